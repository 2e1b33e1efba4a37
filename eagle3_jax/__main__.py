"""`eagle3-jax VERB ...`, also `python -m eagle3_jax VERB ...`: runs a verb; without one, lists them."""

from __future__ import annotations

import runpy
import sys

from eagle3_jax.runs import command_line, environment, machine

VERBS = {verb: known.says for verb, known in command_line.VERBS.items() if " " not in verb}
VERBS |= {
    "benchmark": "Every draft size at every batch size (decode, tune); servers under traffic (serve).",
    "serve": "A server of OpenAI's API.",
    "chat": "A conversation in the terminal.",
    "generate": "Answers to the prompts behind it, in the terminal.",
}
_OTHERS = {"generate": "chat"}  # verb -> module of another name


def main() -> None:
    verb = sys.argv[1] if sys.argv[1:] else "--help"
    if verb in VERBS:
        del sys.argv[1]
        environment.prepare()
        runpy.run_module(f"eagle3_jax.{_OTHERS.get(verb, verb)}", run_name="__main__", alter_sys=True)
        return
    if verb == "--version":
        print(", ".join(f"{name} {version}" for name, version in machine.versions().items()))
        return
    if verb not in ("-h", "--help"):
        print(f"eagle3_jax: got {verb!r}, expected one of {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    print("eagle3-jax VERB --config FILE [--section.field VALUE ...]; `--help` says more of each, `--version` of all\n")
    for verb, does in VERBS.items():
        print(f"  {verb:<12}{does}")


if __name__ == "__main__":
    main()
