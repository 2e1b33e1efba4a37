"""conversations -> what the draft head is trained on.

`python -m eagle3_jax.extract --config configs/quickstart.yaml` lets the target read its own conversations once. Kept
per token: its aux hidden states, the input of its LM head, and its most likely next token, which is all that training
asks of it (EAGLE-3, arXiv 2503.01840, section 3). With `extract.states: none` token ids and loss mask alone are kept,
and the target is not run. The draft vocabulary is counted on the way. A shard of conversations is the unit of
resumption, and what the replicas of a mesh that spans several hosts share among themselves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from eagle3_jax import config as configs
from eagle3_jax.data import features, vocab
from eagle3_jax.data.conversation import Conversation, Rejected, read_conversation
from eagle3_jax.extract.hidden_states import PaddedBatch, compute_records, plan_batches
from eagle3_jax.mesh import Replica, batch_sharding, make_mesh, own_replica, put
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.checkpoint.identity import check_same_target
from eagle3_jax.models.inference_layout import for_inference
from eagle3_jax.runs import command, command_line, disk, manifest, processes
from eagle3_jax.training.kinds.choice import kind_of

REJECTS = "rejects.jsonl"
# Conversations of a split that are read to foretell how much disk all will take.
_SAMPLE = 64


def extract(config: configs.RunConfig, target: Target | None = None) -> None:
    """Extracts the features of `config`'s conversations into its features folder.

    Args:
        target: an already loaded target; None loads `config.target`.

    Raises:
        ManifestError: unfinished conversations, conversations of another target, or a folder of other work.
        ValueError: no conversation could be used.
    """
    conversations, folder = config.folder("regenerate"), config.folder("extract")
    made_from = manifest.read(conversations, made_by="regenerate")
    replica = own_replica(make_mesh(config.mesh))
    reads = config.extract.states != "none"
    target = target or load_target(config.target, replica.mesh, only=None if reads else ())
    if reads:
        target = dataclasses.replace(target, model=for_inference(target.model))
    # What was said does not depend on which hidden states are kept now.
    check_same_target(conversations, made_from["identity"]["target"], target.identity, but=("aux_layers",))
    kind_of(config, target.model.config)  # refuses a head that does not fit the target now
    longest = target.model.config.max_position_embeddings
    if config.extract.max_length > longest:
        raise ValueError(
            f"extract.max_length: got {config.extract.max_length}, expected at most the target's {longest}"
        )
    identity = {
        "verb": "extract",
        "conversations": manifest.fingerprint(made_from),
        "target": target.identity,
        "max_length": config.extract.max_length,
        "shard_records": config.extract.shard_records,
        "draft_vocab_size": config.draft.vocab_size,
        "states": config.extract.states,
    }
    with manifest.claim(folder, identity, newer=("states",)) as finished:
        if finished:
            processes.say(f"extract: {folder} is finished already")
        else:
            _extract(config, target, replica, conversations, folder)


def _extract(
    config: configs.RunConfig,
    target: Target,
    replica: Replica,
    conversations: disk.Path,
    folder: disk.Path,
) -> None:
    processes.agree(lambda: _check_disk(config.extract, conversations, folder, target))
    rates: dict[str, float] = {}
    with jax.set_mesh(replica.mesh):  # kernels are split over it
        for split in configs.SPLITS:
            source = conversations / f"{split}.jsonl"
            rates[split] = _extract_split(config.extract, source, folder / split, target, replica)
    # All shards are there. The processes of a replica count the same tokens.
    rates = processes.total(rates if processes.index() == replica.leader else {})
    processes.agree(lambda: _finish(config, target, conversations, folder, rates))


def _finish(
    config: configs.RunConfig,
    target: Target,
    conversations: disk.Path,
    folder: disk.Path,
    rates: dict[str, float],
) -> None:
    """All shards are there: writes what is said of all of them together."""
    results = {
        split: _summarise(folder / split) | {"tokens_per_second": rates[split] or None} for split in configs.SPLITS
    }
    counts = _token_counts(folder / "train", target.model.config.vocab_size)
    if not results["train"]["records"]:
        raise ValueError(f"{conversations}: none of the conversations could be used, see {folder / 'train' / REJECTS}")
    token_ids = vocab.choose_draft_vocabulary(counts, config.draft.vocab_size)
    vocab.save(folder, token_ids)
    sidecars = [
        str(path.relative_to(folder)) for split in configs.SPLITS for path in sorted((folder / split).glob("*.json"))
    ]
    manifest.finish(
        folder, files=[vocab.NAME, *sidecars], draft_vocabulary_coverage=vocab.coverage(counts, token_ids), **results
    )


def _check_disk(config: configs.ExtractConfig, conversations: disk.Path, folder: disk.Path, target: Target) -> None:
    """Foretells from a sample how much the features will take, and says it. Raises ValueError: more than is free."""
    model = target.model.config
    aux_width, states = len(model.aux_layers) * model.hidden_size, config.states != "none"
    each = features.token_bytes(aux_width, model.hidden_size, states=states)
    tokens = text = whole = 0
    for split in configs.SPLITS:
        source = conversations / f"{split}.jsonl"
        whole += disk.size(source)
        with disk.open_binary(source) as stream:
            for line in itertools.islice(stream, _SAMPLE):
                text += len(line)
                with contextlib.suppress(Rejected):
                    for sequence in read_conversation(line.decode(), target.tokenizer, config.max_length):
                        tokens += len(sequence.token_ids)
    shards = [path for split in configs.SPLITS for path in (folder / split).glob("*.array_record")]
    there = sum(disk.each(disk.size, shards))
    need = max(0, tokens * each * whole // max(text, 1) - there)
    free = disk.free_bytes(folder)
    sizes = f"{need / 2**30:.1f} GiB for features ({each / 1024:.1f} KiB a token)"
    if free is not None:
        sizes += f", {free / 2**30:.1f} GiB are free"
    if free is not None and need > free:
        raise ValueError(f"{folder}: needs about {sizes}; free some space, or choose another run_dir")
    print(f"extract: about {sizes}", file=sys.stderr)


def _extract_split(
    config: configs.ExtractConfig, source: disk.Path, folder: disk.Path, target: Target, replica: Replica
) -> float:
    """Computes this replica's shards of one split that are not yet there. Returns its tokens a second."""
    disk.make_folder(folder)
    with disk.open_binary(source) as stream:
        total = sum(1 for _ in stream)
    shards = max(1, -(-total // config.shard_records))
    paths = [features.shard_path(folder, shard, shards) for shard in range(shards)]
    processes.barrier()  # a replica with several processes must see the same shards as complete on all of them
    complete = disk.each(features.is_complete, paths)
    processes.barrier()
    with disk.open_binary(source) as stream, _Progress(total, f"extract {folder.name}") as progress:
        for shard, path in enumerate(paths):
            command.stop_point()
            lines = [line.decode() for line in itertools.islice(stream, config.shard_records)]
            if complete[shard] or shard % replica.count != replica.index:
                progress.bar.update(len(lines))
            else:
                _extract_shard(config, lines, path, target, replica, shard, progress)
    return progress.rate()


def _summarise(folder: disk.Path) -> dict[str, Any]:
    """The counts of a split for the manifest, of its shards' notes; writes its list of rejects."""
    all_notes = disk.each(features.read_notes, sorted(folder.glob("*.array_record")))
    rejects = [reject for notes in all_notes for reject in notes["rejects"]]
    with disk.atomic(folder / REJECTS) as temporary:
        temporary.write_text("".join(json.dumps(reject, ensure_ascii=False) + "\n" for reject in rejects))
    computed = sum(notes["computed_tokens"] for notes in all_notes)
    kept = sum(notes["tokens"] for notes in all_notes)
    return {
        "records": sum(len(notes["ids"]) for notes in all_notes),
        "rejected": len(rejects),
        "tokens": kept,
        "loss_tokens": sum(sum(notes["token_counts"][1]) for notes in all_notes),
        "padding_share": 1 - kept / computed if computed else 0.0,
    }


class _Progress:
    """A bar of conversations, and the tokens a second of what is computed now."""

    def __init__(self, total: int, name: str) -> None:
        self.bar = tqdm(total=total, desc=name, unit=" conversations", disable=processes.index() > 0)
        self.start, self.tokens = time.monotonic(), 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def rate(self) -> float:
        return self.tokens / (time.monotonic() - self.start)

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.rate():.0f} tokens/s", refresh=False)
        self.bar.update()


def _extract_shard(
    config: configs.ExtractConfig,
    lines: Sequence[str],
    path: disk.Path,
    target: Target,
    replica: Replica,
    seed: int,
    progress: _Progress,
) -> None:
    model = target.model
    conversations: list[Conversation] = []
    rejects: list[dict[str, str]] = []
    for line in lines:
        try:
            conversations.extend(read_conversation(line, target.tokenizer, config.max_length))
        except Rejected as error:
            rejects.append({"id": json.loads(line)["id"], "reason": str(error)})
            progress.add(0)
    progress.bar.total += len(conversations) + len(rejects) - len(lines)  # a conversation may be several sequences
    lengths = [len(c.token_ids) for c in conversations]
    batches = plan_batches(lengths, config.batch_tokens, multiple=replica.mesh.shape["data"], seed=seed)
    states = config.states != "none"
    counts = np.zeros(model.config.vocab_size, np.int64)
    notes: dict[str, Any] = {
        "ids": [],
        "rejects": rejects,
        "tokens": 0,
        "computed_tokens": sum(batch.rows * batch.length for batch in batches) if states else 0,
    }

    def records() -> Iterator[features.Record]:
        place = functools.partial(put, sharding=batch_sharding(replica.mesh))
        if states:
            found = compute_records(conversations, batches, model, place)
        else:
            found = _token_records(conversations, batches)
        for conversation, record in found:
            progress.add(len(conversation.token_ids))
            if record is None:
                rejects.append({"id": conversation.name, "reason": "NaN or infinity in the hidden states"})
                continue
            notes["ids"].append(conversation.name)
            notes["tokens"] += len(conversation.token_ids)
            counts[:] += vocab.count_tokens(conversation.token_ids, conversation.loss_mask, len(counts))
            yield record
        said = np.flatnonzero(counts)
        notes["token_counts"] = [said.tolist(), counts[said].tolist()]

    if processes.index() == replica.leader:
        features.write_shard(path, records(), notes)
    else:  # its part of the work on the devices
        collections.deque(records(), maxlen=0)


def _token_records(
    conversations: Sequence[Conversation], batches: Sequence[PaddedBatch]
) -> Iterator[tuple[Conversation, features.Record]]:
    """Records without the target's states, in the order of those with them: training packs both alike."""
    for batch in batches:
        for conversation in (conversations[index] for index in batch.indices):
            yield conversation, {"token_ids": conversation.token_ids, "loss_mask": conversation.loss_mask}


def _token_counts(folder: disk.Path, vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token counts in the loss, summed over the shards' notes."""
    counts = np.zeros(vocab_size, np.int64)
    for notes in disk.each(features.read_notes, list(folder.glob("*.array_record"))):
        token_ids, times = notes["token_counts"]
        counts[np.asarray(token_ids, np.int64)] += np.asarray(times, np.int64)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config, _ = command_line.read("extract", argv)
    with command.run("extract"):
        extract(config)


if __name__ == "__main__":
    main()
