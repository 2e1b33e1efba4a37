"""The page in a real browser: an answer streams, drafted tokens stand out, the last round's tree opens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from eagle3_jax.config import TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.models.checkpoint.fetch import load_target

pytestmark = pytest.mark.slow

PATIENCE = 240  # seconds: the first answer waits for its programs to be compiled


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as found:
        found.set_page_load_timeout(PATIENCE)
        yield found


def ask(browser, url: str, prompt: str, tokens: int, button: str) -> None:
    """Types, clicks, and waits until the answer has ended."""
    browser.get(f"{url}/")
    wait = WebDriverWait(browser, PATIENCE)
    wait.until(lambda _: browser.find_element(By.ID, "model").text == "org/tiny")
    for field, text in (("prompt", prompt), ("max", str(tokens))):
        element = browser.find_element(By.ID, field)
        element.clear()
        element.send_keys(text)
    browser.find_element(By.ID, button).click()
    wait.until(lambda _: browser.execute_script("return document.body.dataset.state") == "done")


def test_what_is_refused_and_what_cannot_be_is_shown(browser, served):
    ask(browser, served.url, "apple bird <b>cloud</b>", 4, "ask")
    wait = WebDriverWait(browser, PATIENCE)
    browser.find_element(By.ID, "compare").click()
    error = browser.find_element(By.ID, "error")
    wait.until(lambda _: error.is_displayed())
    assert "drafts: got False" in error.text  # this engine has no choice
    wait.until(lambda _: browser.find_element(By.ID, "ask").is_enabled())
    browser.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    assert not any(browser.find_element(By.ID, button).is_enabled() for button in ("ask", "compare")), "no prompt"
    for speed, doubts in ((1.9, False), (2.1, True)):
        fast = f"{{speed: {speed}, count: 4, own: 2, title: document.createElement('h2')}}"
        browser.execute_script(f"at('error').hidden = true; showSpeedup({{speed: 1}}, {fast})")
        assert error.is_displayed() == doubts
    assert "2.00 tokens a round cannot be 2.10 times as fast" in error.text
    assert [x for x in browser.get_log("browser") if "400" not in x["message"]] == []


def colour(browser, element) -> str:
    return browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", element)


def test_the_same_answer_without_drafts_and_with(browser, serving, tmp_path):
    """An engine that chooses: live tokens/s of both, every token in its depth's colour, the last round's tree."""
    target = load_target(TargetConfig(name=str(tiny.write_target(tmp_path)), aux_layers=(1, 2, 3)))
    engine = Engine.load(target, "lookup", "auto", batch_size=1, max_length=256)
    with serving(engine=engine) as served:
        ask(browser, served.url, "apple bird", 100, "compare")
        body: Any = {"messages": [{"role": "user", "content": "apple bird"}], "temperature": 0, "max_tokens": 100}
        options: Any = {"stream": True, "extra_body": {"stream_options": {"include_drafts": True}}}
        events = list(served.client.chat.completions.create(model="org/tiny", **body, **options))
    shown = [
        token
        for event in events
        for choice in event.choices
        for token in getattr(choice, "drafts", {}).get("tokens", [])
    ]
    plain, fast = browser.find_elements(By.CSS_SELECTOR, "#answers article")
    titles = [card.find_element(By.TAG_NAME, "h2").text for card in (plain, fast)]
    assert titles[0] == "Without drafts" and titles[1].startswith("With drafts")
    texts = [card.find_element(By.CSS_SELECTOR, ".text").get_property("textContent") for card in (plain, fast)]
    assert texts[0] == texts[1] == b"".join(bytes(token["bytes"]) for token in shown).decode()

    speeds = [float(card.find_element(By.CSS_SELECTOR, ".numbers b").text) for card in (plain, fast)]
    assert all(" tokens/s" in card.find_element(By.CSS_SELECTOR, ".numbers").text for card in (plain, fast))
    times = re.fullmatch(r"(\d+\.\d\d) times as fast", fast.find_element(By.ID, "speedup").text)
    assert times and float(times[1]) == pytest.approx(speeds[1] / speeds[0], abs=0.01, rel=0.01)
    assert plain.find_elements(By.ID, "speedup") == []

    legend = browser.find_elements(By.CSS_SELECTOR, ".legend span")
    colours = {span.get_attribute("data-depth"): colour(browser, span) for span in legend}
    assert list(colours) == ["1", "2", "3", "4", "5", "6"] and len(set(colours.values())) == 6
    spans = fast.find_elements(By.CSS_SELECTOR, ".text span")
    expected = [str(min(token["depth"], 6)) if token["depth"] else None for token in shown]
    assert [span.get_attribute("data-depth") for span in spans] == expected and {"1", "2", None} <= set(expected)
    uncoloured = colour(browser, fast)
    assert [colour(browser, span) for span in spans] == [colours.get(str(depth), uncoloured) for depth in expected]
    assert plain.find_elements(By.CSS_SELECTOR, ".text span[data-depth]") == []

    assert not plain.find_element(By.TAG_NAME, "details").is_displayed()
    summary = fast.find_element(By.TAG_NAME, "summary")
    counts = re.search(r"(\d+) tokens, (\d+) accepted", summary.text)
    assert counts and fast.find_elements(By.CSS_SELECTOR, "svg") == []
    summary.click()
    WebDriverWait(browser, PATIENCE).until(lambda _: fast.find_elements(By.CSS_SELECTOR, "svg rect"))
    assert len(fast.find_elements(By.CSS_SELECTOR, "svg rect")) == 1 + int(counts[1])  # the root
    assert len(fast.find_elements(By.CSS_SELECTOR, "svg rect.accepted")) == 1 + int(counts[2])
    assert len(fast.find_elements(By.CSS_SELECTOR, "svg path")) == int(counts[1])
    assert browser.get_log("browser") == []
