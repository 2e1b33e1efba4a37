"""`python -m eagle3_jax`: says which verbs there are."""

from __future__ import annotations

import sys

VERBS = {
    "prepare": "prompts -> clean, de-duplicated prompts, some of them held out",
    "regenerate": "prompts -> conversations that the target itself answered",
    "extract": "conversations -> the target's hidden states; chooses the draft vocabulary",
    "train": "features -> a draft head",
    "export": "checkpoint -> a head that SGLang, vLLM and this engine serve; converts and checks heads",
    "evaluate": "acceptance, losslessness and speed against vanilla decoding",
    "report": "all that a run measured, as a table, as JSON and as a picture",
    "benchmark": "every draft size at every batch size (decode, tune); servers under traffic (serve)",
    "serve": "a server of OpenAI's API",
}


def main() -> None:
    if sys.argv[1:] and sys.argv[1:] not in (["-h"], ["--help"]):
        named = sys.argv[1] if sys.argv[1] in VERBS else "VERB"
        print(f"eagle3_jax: got {' '.join(sys.argv[1:])!r}, expected python -m eagle3_jax.{named}", file=sys.stderr)
        sys.exit(2)
    print("python -m eagle3_jax.VERB --config FILE [--section.field VALUE ...]; `--help` says more of each\n")
    for verb, does in VERBS.items():
        print(f"  {verb:<12}{does}")


if __name__ == "__main__":
    main()
