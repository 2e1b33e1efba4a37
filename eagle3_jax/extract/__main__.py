"""conversations -> what the draft head is trained on.

The target runs over its own conversations once. A token keeps its aux hidden states, the input of the LM head, and its
most likely next token: all that training asks of the target (EAGLE-3, arXiv 2503.01840, section 3). With
`extract.states: none` token ids and loss mask alone are kept. The draft vocabulary is counted on the way. A shard of
conversations is the unit of resumption; the replicas of the mesh, and the processes of a replica, share the shards.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.config import SPLITS, RunConfig
from eagle3_jax.data import features, lines, vocab
from eagle3_jax.data.conversation import Rejected, read_conversation
from eagle3_jax.extract import mixing, pipeline
from eagle3_jax.extract.hidden_states import choose_lengths
from eagle3_jax.mesh import Replica, batch_sharding, make_mesh, own_replica, put
from eagle3_jax.models.checkpoint.fetch import Target, keep_programs_in_bucket, load_target
from eagle3_jax.models.checkpoint.identity import check_same_target
from eagle3_jax.models.inference_layout import for_many_rows
from eagle3_jax.runs import command, command_line, disk, manifest, processes
from eagle3_jax.training.kinds.kind import kind_of

REJECTS = "rejects.jsonl"
# Conversations sampled from a split to estimate the size of the features and to choose padded lengths.
_SAMPLE = 64


def extract(config: RunConfig, target: Target | None = None) -> None:
    """Extracts the features of `config`'s conversations into its features folder.

    Raises ManifestError: unfinished conversations, those of another target, or a folder of other work. ValueError: no
    conversation could be used.
    """
    conversations, folder = config.folder("regenerate"), config.folder("extract")
    made_from = manifest.read(conversations, made_by="regenerate")
    replica = own_replica(make_mesh(config.mesh))
    reads = config.extract.states != "none"
    target = target or load_target(config.target, replica.mesh, only=None if reads else ())
    if reads:
        target = dataclasses.replace(target, model=for_many_rows(target.model))
    # The conversations do not depend on which hidden states are kept now.
    check_same_target(conversations, made_from["identity"]["target"], target.identity, but=("aux_layers",))
    kind_of(config, target.model.config)  # refuses a head that does not fit the target now
    longest = target.model.config.max_position_embeddings
    if (got := config.extract.max_length) > longest:
        raise ValueError(f"extract.max_length: got {got}, expected at most the target's {longest}")
    identity = {
        "verb": "extract",
        "conversations": manifest.fingerprint(made_from),
        "target": target.identity,
        "draft_vocab_size": config.draft.vocab_size,
        **{name: getattr(config.extract, name) for name in ("max_length", "shard_records", "states")},
    }
    mix = None
    if config.extract.mix is not None:
        mix = processes.agree(lambda: mixing.wanted(config.extract.mix or {})) | {"seed": config.seed}
        identity["mix"] = mix
    with manifest.claim(folder, identity) as finished:
        if finished:
            processes.say(f"extract: {folder} is finished already")
        else:
            _Extraction(config, target, replica, mix).run()


class _Extraction:
    """The work of the verb. `mix`: see `mixing.wanted`; None keeps all conversations."""

    def __init__(self, config: RunConfig, target: Target, replica: Replica, mix: dict[str, Any] | None) -> None:
        self._config, self._target, self._replica, self._kept = config, target, replica, {}
        self._conversations, self._folder = config.folder("regenerate"), config.folder("extract")
        limits = None
        if mix is not None:
            train = self._conversations / "train.jsonl"
            limits, self._kept = processes.agree(lambda: mixing.choose(mix, train, target.tokenizer))
            parts = (f"{name} {x['kept']:,} of {x['of']:,}" for name, x in self._kept.items())
            processes.say(f"extract: {mix['by']} of the mix: {', '.join(parts)}")
        self._select = functools.partial(mixing.select, limits=limits, seed=config.seed)

    def run(self) -> None:
        padded = choose_lengths(processes.agree(self._foretell), self._config.extract.max_length)
        with jax.set_mesh(self._replica.mesh):  # kernels are split over it
            rates = {split: self._extract(split, padded) for split in SPLITS}
        rates = processes.total(rates)  # all shards are there
        processes.agree(lambda: self._finish(rates))

    def _foretell(self) -> list[int]:
        """Prints and checks the features' size by a sample of conversations; returns the sample's lengths."""
        config, model = self._config.extract, self._target.model.config
        each = features.token_bytes(len(model.aux_layers), model.hidden_size, config.states)
        lengths: list[int] = []
        text = whole = 0
        for split in SPLITS:
            source = self._conversations / f"{split}.jsonl"
            whole += disk.size(source)
            with disk.open_binary(source) as stream:
                for line in itertools.islice(self._select(stream), _SAMPLE):
                    with contextlib.suppress(Rejected):
                        sequences = read_conversation(line, self._target.tokenizer, config.max_length)
                        lengths += [len(sequence.token_ids) for sequence in sequences]
                text += stream.tell()
        shards = [path for split in SPLITS for path in (self._folder / split).glob("*.array_record")]
        there = sum(disk.each(disk.size, shards))
        need = max(0, sum(lengths) * each * whole // max(text, 1) - there)
        sizes = f"{need / 2**30:.1f} GiB for features ({each / 1024:.1f} KiB a token)"
        if place := disk.system_path(self._folder):  # a bucket has no limit
            free = shutil.disk_usage(place).free
            sizes += f", {free / 2**30:.1f} GiB are free"
            if need > free:
                raise ValueError(f"{self._folder}: needs about {sizes}; free some space, or choose another run_dir")
        processes.say(f"extract: about {sizes}")
        return lengths

    def _extract(self, split: str, padded: Sequence[int]) -> float:
        """Computes this replica's missing shards of a split. Returns the tokens a second that this process wrote."""
        config, replica = self._config.extract, self._replica
        source, folder = self._conversations / f"{split}.jsonl", self._folder / split
        with disk.open_binary(source) as stream:
            total = sum(1 for _ in self._select(stream))
        shards = max(1, -(-total // config.shard_records))
        paths = [features.shard_path(folder, shard, shards) for shard in range(shards)]
        processes.barrier()  # a replica with several processes must see the same shards as complete on all of them
        complete = disk.each(features.is_complete, paths)
        processes.barrier()
        place = functools.partial(put, sharding=batch_sharding(replica.mesh))
        with disk.open_binary(source) as stream, pipeline.ConversationBar(total, f"extract {split}") as progress:

            def missing() -> Iterator[pipeline.Shard]:
                selected = self._select(stream)
                for shard, path in enumerate(paths):
                    own = list(itertools.islice(selected, config.shard_records))
                    if complete[shard] or shard % replica.count != replica.index:
                        progress.skip(len(own))
                    else:
                        yield pipeline.Shard(shard, path, own)

            pipeline.run(missing(), config, self._target, replica, padded, place, progress)
        return progress.rate()

    def _finish(self, rates: dict[str, float]) -> None:
        folder, results = self._folder, {}
        counts = np.zeros(self._target.model.config.vocab_size, np.int64)  # how often each token counts in the loss
        for split in SPLITS:
            notes = disk.each(features.read_notes, sorted((folder / split).glob("*.array_record")))
            results[split] = _summarise(folder / split, notes) | {"tokens_per_second": rates[split] or None}
            for token_ids, times in (note["token_counts"] for note in notes if split == "train"):
                counts[np.asarray(token_ids, np.int64)] += np.asarray(times, np.int64)
        if not results["train"]["records"]:
            expected = f"none of the conversations could be used, see {folder / 'train' / REJECTS}"
            raise ValueError(f"{self._conversations}: {expected}")
        token_ids = vocab.choose_draft_vocabulary(counts, self._config.draft.vocab_size)
        vocab.save(folder, token_ids)
        sidecars = [path for split in SPLITS for path in sorted((folder / split).glob("*.json"))]
        results["draft_vocabulary_coverage"] = vocab.coverage(counts, token_ids)
        results |= {"mix": self._kept} if self._kept else {}
        files = [vocab.NAME, *(str(path.relative_to(folder)) for path in sidecars)]
        manifest.finish(folder, files=files, **results)


def _summarise(folder: disk.Path, all_notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums the notes of a split's shards for the manifest, and writes the list of rejects."""
    rejects = [reject for notes in all_notes for reject in notes["rejects"]]
    with lines.written(folder / REJECTS) as add:
        for reject in rejects:
            add(reject)
    provenance: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    categories: collections.Counter[str] = collections.Counter()
    for notes in all_notes:
        categories.update(notes["categories"])
        for source, licenses in notes["provenance"].items():
            provenance[source].update(licenses)
    computed = sum(notes["computed_tokens"] for notes in all_notes)
    kept = sum(notes["tokens"] for notes in all_notes)
    return {
        "records": sum(len(notes["ids"]) for notes in all_notes),
        "rejected": len(rejects),
        "tokens": kept,
        "loss_tokens": sum(sum(notes["token_counts"][1]) for notes in all_notes),
        "padding_share": 1 - kept / computed if computed else 0.0,
        "provenance": provenance,
        "categories": categories,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb from its command line."""
    config, _ = command_line.read("extract", argv)
    with command.run("extract"):
        keep_programs_in_bucket(config.run_dir)
        extract(config)


if __name__ == "__main__":
    main()
