"""Cloud DLP: what it is asked, where its findings are, and what a service that fails costs. All on loopback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from fake_dlp import FakeDlp

from eagle3_jax.config import CloudDlpConfig
from eagle3_jax.data import personal
from eagle3_jax.prepare import cloud_dlp
from eagle3_jax.runs import command, disk

TEXTS = ["Ask jane@example.org, or Jane Doe.", "Nothing here.", "😀 Спросите Иван Петров <ivan@example.org>", ""]
SPANS = [
    [(4, 20, "EMAIL_ADDRESS"), (25, 33, "PERSON_NAME")],
    [],
    [(24, 40, "EMAIL_ADDRESS"), (11, 22, "PERSON_NAME")],
    [],
]


def settings(server: FakeDlp, **more: Any) -> CloudDlpConfig:
    how: dict[str, Any] = {"project": "my-project", "location": "europe-west1", "token_variable": "DLP_TOKEN"}
    return CloudDlpConfig(**how | {"url": server.url} | more)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rests take no time; they are noted."""
    rests: list[float] = []
    monkeypatch.setenv("DLP_TOKEN", "secret")
    monkeypatch.setattr(cloud_dlp, "_pause", rests.append)
    return rests


@pytest.fixture
def server() -> Iterator[FakeDlp]:
    with FakeDlp() as fake:
        yield fake


def test_findings_are_spans_of_characters_in_their_texts(server):
    assert cloud_dlp.CloudDlp(settings(server)).inspect(TEXTS) == SPANS
    assert server.asked == [TEXTS], "one request"
    redacted, found = personal.replace(TEXTS[2], SPANS[2])
    assert redacted == "😀 Спросите <PERSON_NAME> <<EMAIL_ADDRESS>>"
    assert found == {"EMAIL_ADDRESS": 1, "PERSON_NAME": 1}
    assert cloud_dlp.CloudDlp(settings(server)).inspect([]) == []


@pytest.mark.slow
def test_a_request_holds_many_texts_and_never_more_than_the_service_takes(server, monkeypatch):
    texts = [f"{number}: 山田太郎 " + "字" * (7 * number % 2000) for number in range(300)]
    found = cloud_dlp.CloudDlp(settings(server)).inspect(texts)
    assert all(personal.replace(text, spans)[1] == {"PERSON_NAME": 1} for text, spans in zip(texts, found, strict=True))
    assert server.cells == texts and 2 <= len(server.asked) <= 3  # the server refuses more than 500,000 bytes
    server.asked.clear()
    monkeypatch.setattr(cloud_dlp, "_REQUEST_CELLS", 3)
    assert cloud_dlp.CloudDlp(settings(server)).inspect(TEXTS * 2) == SPANS * 2
    assert list(map(len, server.asked)) == [3, 3, 2]


def test_a_long_text_is_several_cells_and_a_finding_at_a_cut_is_whole(server, monkeypatch):
    monkeypatch.setattr(cloud_dlp, "_PIECE", 100)
    monkeypatch.setattr(cloud_dlp, "_OVERLAP", 30)
    texts = ["x" * before + " jane@example.org " + "y" * 200 for before in range(60, 110)]
    for text, spans in zip(texts, cloud_dlp.CloudDlp(settings(server)).inspect(texts), strict=True):
        redacted, found = personal.replace(text, spans)
        assert redacted == text.replace("jane@example.org", "<EMAIL_ADDRESS>") and found == {"EMAIL_ADDRESS": 1}
    assert max(map(len, server.cells)) == 100


def test_too_many_findings_for_an_answer_are_asked_in_halves():
    texts = [f"a{number}@example.org b{number}@example.org" for number in range(20)]
    with FakeDlp(most=5) as fake:
        found = cloud_dlp.CloudDlp(settings(fake)).inspect([*texts, " ".join(texts)])
        assert [len(spans) for spans in found[:20]] == [2] * 20
        redacted, kinds = personal.replace(" ".join(texts), found[-1])
        assert "@" not in redacted and kinds == {"EMAIL_ADDRESS": 40}


def test_a_service_that_fails_for_a_while_is_asked_again(at_once):
    half = b'{"result": {"findings": [{"infoType": {"name": "EMAIL_ADDRESS"}, "loca'
    elsewhere = b'{"result": {"findings": [{"infoType": {"name": "X"}, "location": {"codepointRange": {"end": "99"},'
    elsewhere += b'"contentLocations": [{"recordLocation": {}}]}}]}}'
    script = [(429, {"Retry-After": "7"}), (500, {}), "drop", half, elsewhere, (503, {})]
    with FakeDlp(rule=lambda number: script[number] if number < len(script) else None) as fake:
        assert cloud_dlp.CloudDlp(settings(fake)).inspect(TEXTS) == SPANS
        assert fake.requests == len(script) + 1
    assert at_once == [7.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_service_that_stays_away_is_one_sentence():
    with FakeDlp() as fake:
        service = cloud_dlp.CloudDlp(settings(fake))
    with pytest.raises(ValueError, match=r"^prepare.cloud_dlp: http://.*: 8 attempts: got no answer .*; run it again$"):
        service.inspect(TEXTS)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_not_asked_again(status):
    with (
        FakeDlp(rule=lambda _: (status, {})) as fake,
        pytest.raises(ValueError, match=rf"^prepare.cloud_dlp: .*content:inspect: status {status}: .*Quota exceeded"),
    ):
        cloud_dlp.CloudDlp(settings(fake)).inspect(TEXTS)
    assert fake.requests == 1


def test_credentials_are_the_user_s_by_name(server, monkeypatch):
    with pytest.raises(ValueError, match=r"token_variable: got no NONE in the environment, expected a token in it"):
        cloud_dlp.CloudDlp(settings(server, token_variable="NONE"))
    monkeypatch.setattr(cloud_dlp.clients, "credentials_kind", lambda: "anonymous")
    with pytest.raises(ValueError, match=r"status 400: .*authorization None"):
        cloud_dlp.CloudDlp(settings(server, token_variable=None)).inspect(TEXTS)

    class Found:
        valid, renewed = False, 0

        def refresh(self, request: Any) -> None:
            self.valid, self.renewed = True, self.renewed + 1

        def apply(self, headers: dict[str, str]) -> None:
            headers["Authorization"] = "Bearer secret"

    found = Found()
    monkeypatch.setattr(cloud_dlp.clients, "credentials", lambda: found)
    service = cloud_dlp.CloudDlp(settings(server, token_variable=None))
    assert service.inspect(TEXTS) == SPANS and service.inspect(TEXTS) == SPANS and found.renewed == 1
    found.valid = False  # it expires within an hour
    assert service.inspect(TEXTS) == SPANS and found.renewed == 2


def test_what_was_found_is_not_paid_for_again(server, tmp_path):
    path = tmp_path / "findings.jsonl"
    assert cloud_dlp.remembered(cloud_dlp.CloudDlp(settings(server)).inspect, path)(TEXTS) == SPANS
    assert cloud_dlp.remembered(cloud_dlp.CloudDlp(settings(server)).inspect, path)([*TEXTS, "more"]) == [*SPANS, []]
    assert server.asked == [TEXTS, ["more"]]
    assert b"jane" not in disk.read_bytes(path)


def test_a_signal_ends_the_waiting(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(command, "_asked", signal.SIGTERM)
    with pytest.raises(command.Stopped):
        cloud_dlp._pause(60.0)
