"""prompts -> conversations that the target itself answered.

`python -m eagle3_jax.regenerate --config configs/quickstart.yaml` keeps the users' turns and lets the target answer
them: a draft head learns to predict the target's words, not the right ones. Answers go to
`conversations/*.jsonl.partial` as they finish, so that a killed run goes on where it was. Conversations that the target
had in another engine (`prepare`'s source `conversations`) are passed on. Each replica of the mesh answers its share
with an engine a row, into a log of its own; a rerun may have another number of replicas.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import tqdm

from eagle3_jax import config as configs
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.request import Output
from eagle3_jax.mesh import Replica, make_mesh, own_replica
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import command, command_line, disk, manifest, processes


@dataclasses.dataclass(frozen=True)
class Answer:
    """The target's answer in one turn; a line of the log.

    Attributes:
        token_ids: the sampled tokens, the end of sequence included. Training reads these, since their text may be
            tokenised otherwise.
        text: the answer without the `reasoning`, as the history of later turns has it.
        failed: whether the engine failed in the middle, see `Output.error`.
    """

    id: str
    turn: int
    text: str
    token_ids: list[int]
    truncated: bool
    failed: bool = False
    reasoning: str = ""


@dataclasses.dataclass
class Dialogue:
    """A prompt on its way to a conversation.

    Attributes:
        end: the reason why no turn follows: "complete", "truncated" (the last answer reached max_tokens), "empty" (the
            next answer had no text, and was not cut off in its reasoning), "failed" (in the next answer), "too_long"
            (the next turn does not fit), "refused" (by the chat template), "given" (answered before, by another
            engine).
    """

    prompt: dict[str, Any]
    answers: list[Answer] = dataclasses.field(default_factory=list)
    end: str | None = None

    @classmethod
    def begin(cls, prompt: dict[str, Any]) -> Dialogue:
        roles = {message["role"] for message in prompt["messages"]}
        return cls(prompt, end="given" if "assistant" in roles else None if "user" in roles else "refused")

    @property
    def is_conversation(self) -> bool:
        return bool(self.answers) or self.end == "given"

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.prompt["messages"])

    def messages(self, turns: int) -> list[dict[str, str]]:
        """Returns the prompt's messages up to the user's turn `turns` (from 1), with the answers so far."""
        messages, answers = [], iter(self.answers)
        for message in self.prompt["messages"]:
            messages.append(message)
            if message["role"] == "user":
                turns -= 1
                answer = next(answers, None)
                if answer is not None:
                    messages.append({"role": "assistant", "content": answer.text})
                if turns == 0:
                    break
        return messages

    def take(self, answer: Answer) -> None:
        """Continues with an answer, or ends."""
        if answer.failed:
            self.end = "failed"
            return
        if not answer.text.strip() and not (answer.truncated and answer.reasoning.strip()):
            self.end = "empty"
            return
        self.answers.append(answer)
        if answer.truncated:  # this turn has no end, so no turn can follow it
            self.end = "truncated"
        elif len(self.answers) == self.turns:
            self.end = "complete"

    def conversation(self) -> dict[str, Any]:
        """Makes a line of the output; `answer_ids`, the token ids of each answer, is None where only text is known."""
        if self.end == "given":
            return self.prompt | {"answer_ids": None}
        return {
            "id": self.prompt["id"],
            "category": self.prompt["category"],
            **({"tools": self.prompt["tools"]} if "tools" in self.prompt else {}),
            "messages": self.messages(len(self.answers)),
            "truncated": self.answers[-1].truncated,
            "answer_ids": [answer.token_ids for answer in self.answers],
        }


def regenerate(config: configs.RunConfig) -> None:
    """Answers the prompts of a run; does nothing when that is finished.

    Raises:
        ManifestError: unfinished prompts, or the folder holds other work.
        ValueError: regenerate.max_length is beyond the target's, or no prompt could be answered.
    """
    prompts, folder, settings = config.folder("prepare"), config.folder("regenerate"), config.regenerate
    made_from = manifest.read(prompts, made_by="prepare")
    dialogues = {split: _dialogues(prompts, split) for split in configs.SPLITS}
    open_ends = any(dialogue.end is None for split in dialogues.values() for dialogue in split)
    replica = own_replica(make_mesh(config.mesh))
    target = load_target(config.target, replica.mesh, only=None if open_ends else ())
    identity = {
        "verb": "regenerate",
        "prompts": manifest.fingerprint(made_from),
        "given": _given(made_from["identity"]),
        # The answers do not depend on which hidden states are kept later.
        "target": {field: value for field, value in target.identity.items() if field != "aux_layers"},
        "seed": config.seed,
        "temperature": configs.to_dict(settings)["temperature"],
        "max_tokens": settings.max_tokens,
        "max_length": settings.max_length,
    }
    with manifest.claim(folder, identity) as finished:
        if finished:
            processes.say(f"regenerate: {folder} is finished already")
        else:
            engines = []  # all prompts are answered already
            if open_ends:
                sizes = settings.batch_size, settings.max_length
                engines = [Engine.load(row, None, "auto", *sizes) for row in data_parallel.targets(target, replica)]
            _regenerate(config, engines, replica, dialogues, folder)
        processes.agree(lambda: _remove_logs(folder))


def _given(prepared: dict[str, Any]) -> dict[str, str]:
    """Maps path to sha256 for the files of conversations that the target had in another engine."""
    sources = prepared.get("prepare", {}).get("sources", [])
    return {s["path"]: prepared["inputs"][s["path"]] for s in sources if s["kind"] == "conversations"}


def _dialogues(prompts: disk.Path, split: str) -> list[Dialogue]:
    return [Dialogue.begin(prompt) for prompt in disk.read_jsonl(prompts / f"{split}.jsonl")]


def _regenerate(
    config: configs.RunConfig,
    engines: Sequence[Engine],
    replica: Replica,
    dialogues: dict[str, list[Dialogue]],
    folder: disk.Path,
) -> None:
    known = {split: _known(folder, split) for split in configs.SPLITS}
    processes.barrier()  # from here on logs grow
    leads = replica.leader == processes.index()
    rates: dict[str, float] = dict.fromkeys(configs.SPLITS, 0.0)
    for split in configs.SPLITS:
        if not engines:
            break
        # The processes of a replica get the same answers; its leader writes them.
        log = _log(folder, split, replica.index) if leads else None
        answerer = Answerer(engines, config.regenerate, config.seed, known[split], log)
        answerer.converse(dialogues[split][replica.index :: replica.count], split)
        rates[split] = answerer.rate()
    rates = processes.total(rates if leads else {})  # waits until all prompts are answered
    processes.agree(lambda: _finish(config, engines, folder, rates))


def _finish(config: configs.RunConfig, engines: Sequence[Engine], folder: disk.Path, rates: dict[str, float]) -> None:
    """Writes the conversations in the prompts' order, once all answers are in the logs."""
    results = {}
    for split in configs.SPLITS:
        of_split = _dialogues(config.folder("prepare"), split)
        if engines:
            Answerer(engines, config.regenerate, config.seed, _known(folder, split), log=None).converse(of_split, split)
        with disk.atomic(folder / f"{split}.jsonl") as temporary, temporary.open("w", encoding="utf-8") as stream:
            for dialogue in of_split:
                if dialogue.is_conversation:
                    stream.write(json.dumps(dialogue.conversation(), ensure_ascii=False) + "\n")
        results[split] = _counts(of_split) | {"tokens_per_second": rates[split] or None}
    if not results["train"]["conversations"]:
        raise ValueError(f"{config.folder('prepare')}: none of the prompts was answered: {results['train']['dropped']}")
    manifest.finish(folder, files=[f"{split}.jsonl" for split in configs.SPLITS], **results)


class Answerer:
    """Answers dialogues with engines, and keeps the answers in a log file.

    A turn's random seed is derived from the prompt's id and the run's seed: an answer depends neither on its engine nor
    on an interruption of the run.

    Args:
        known: answers of an earlier run, by prompt and turn; these turns are not generated again.
        log: file of new answers; None keeps none.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: configs.RegenerateConfig,
        seed: int,
        known: dict[tuple[str, int], Answer],
        log: disk.Path | None,
    ) -> None:
        self.engines, self.settings, self.seed, self.known, self.log = engines, settings, seed, known, log
        self.tokens, self.seconds = 0, 0.0

    def rate(self) -> float:
        """Returns the tokens a second generated by this process; 0 when all answers were in the log."""
        return self.tokens / self.seconds if self.tokens else 0.0

    def converse(self, dialogues: Sequence[Dialogue], name: str) -> None:
        """Answers all first turns, then all second ones, and so on, until every dialogue has ended."""
        turn = 0
        while True:
            missing = [
                (dialogue, ids)
                for dialogue in dialogues
                if dialogue.end is None
                and (dialogue.prompt["id"], turn) not in self.known
                and (ids := self._ask(dialogue, turn))
            ]
            answered = [dialogue for dialogue in dialogues if dialogue.end is None]
            if not answered:
                return
            self._answer(missing, turn, f"{name}, turn {turn + 1}")
            for dialogue in answered:
                dialogue.take(self.known[dialogue.prompt["id"], turn])
            turn += 1

    def _ask(self, dialogue: Dialogue, turn: int) -> list[int] | None:
        """Encodes the next turn's prompt; None ends the dialogue."""
        try:
            messages, tools = dialogue.messages(turn + 1), dialogue.prompt.get("tools")
            ids = chat_template.prompt_ids(self.engines[0].tokenizer, messages, tools)
        except chat_template.RefusedError:
            dialogue.end = "refused"
            return None
        if len(ids) > self.settings.max_length - self.settings.max_tokens:
            dialogue.end = "too_long"
            return None
        return ids

    def _answer(self, asked: list[tuple[Dialogue, list[int]]], turn: int, name: str) -> None:
        """Generates the asked turns into `known`."""
        names = [dialogue.prompt["id"] for dialogue, _ in asked]
        start, before = time.monotonic(), self.tokens
        with (
            contextlib.nullcontext() if self.log is None else disk.Log(self.log) as stream,
            tqdm.tqdm(desc=name, total=len(asked), unit=" answers", disable=self.log is None) as progress,
        ):

            def on_output(index: int, output: Output) -> None:
                answer = _to_answer(names[index], turn, output)
                self.known[answer.id, turn] = answer
                if stream is not None:
                    stream.append(dataclasses.asdict(answer))
                self.tokens += len(answer.token_ids)
                rate = (self.tokens - before) / (time.monotonic() - start)
                progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                progress.update()
                command.stop_point()

            params = [self._params(name, turn) for name in names]
            data_parallel.generate(self.engines, [ids for _, ids in asked], params, on_output)
        self.seconds += time.monotonic() - start

    def _params(self, name: str, turn: int) -> SamplingParams:
        digest = hashlib.sha256(f"{self.seed}/{name}/{turn}".encode()).digest()
        temperatures = self.settings.temperatures  # a prompt has one for all its turns
        chosen = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % len(temperatures)
        return SamplingParams(
            temperature=temperatures[chosen],
            max_tokens=self.settings.max_tokens,
            seed=int.from_bytes(digest[:4], "big"),
        )


def _to_answer(name: str, turn: int, output: Output) -> Answer:
    truncated, failed = output.finish_reason == "length", output.finish_reason == "error"
    return Answer(name, turn, output.text, output.token_ids, truncated, failed, output.reasoning)


def _counts(dialogues: Sequence[Dialogue]) -> dict[str, Any]:
    """Counts a split for the manifest. Dialogues without any answer are no conversations."""
    kept = [dialogue for dialogue in dialogues if dialogue.is_conversation]
    given = sum(dialogue.end == "given" for dialogue in kept)
    return {
        "prompts": len(dialogues),
        "conversations": len(kept),
        "answered_by": {"target": len(kept) - given, "given": given},
        "answers": sum(len(dialogue.answers) for dialogue in kept),
        "tokens": sum(len(answer.token_ids) for dialogue in kept for answer in dialogue.answers),
        "ended": dict(collections.Counter(dialogue.end for dialogue in kept)),
        "dropped": dict(collections.Counter(dialogue.end for dialogue in dialogues if not dialogue.is_conversation)),
    }


def _log(folder: disk.Path, split: str, replica: int | str) -> disk.Path:
    return folder / f"{split}.{replica}.jsonl.partial"


def _known(folder: disk.Path, split: str) -> dict[tuple[str, int], Answer]:
    """Reads all answers in the logs, of every run and replica, while no process writes them."""
    logs = sorted(folder.glob(_log(folder, split, "*").name))
    return {(a.id, a.turn): a for log in logs for line in disk.read_log(log) for a in [Answer(**line)]}


def _remove_logs(folder: disk.Path) -> None:
    for split in configs.SPLITS:
        for log in folder.glob(_log(folder, split, "*").name):
            disk.remove_log(log)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb from its command line."""
    config, _ = command_line.read("regenerate", argv)
    with command.run("regenerate"):
        regenerate(config)


if __name__ == "__main__":
    main()
