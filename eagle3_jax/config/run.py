"""A run's configuration: all sections, and its folders."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eagle3_jax.config.checks import require, section
from eagle3_jax.config.data import ExtractConfig, PrepareConfig, RegenerateConfig
from eagle3_jax.config.models import DraftConfig, MeshConfig, TargetConfig
from eagle3_jax.config.serving import (
    BenchmarkConfig,
    CardConfig,
    EvaluateConfig,
    ExportConfig,
    ServeConfig,
    TrafficConfig,
)
from eagle3_jax.config.training import TrainConfig
from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket.clients import SCHEME

# verb -> its output folder inside run_dir; one verb's output is the next one's input.
FOLDERS = {
    "prepare": "prompts",
    "regenerate": "conversations",
    "extract": "features",
    "train": "checkpoints",
    "export": "export",
    "evaluate": "evaluation",
    "benchmark": "benchmark",
}

# The parts of a run's data: what the head learns from, and what it is measured on.
SPLITS = ("train", "held_out")


@section()
class RunConfig:
    """One run: its models, and one section per verb.

    Attributes:
        run_dir: folder of the run, with one folder for each verb's output; or gs://BUCKET/FOLDER. Its path has none of
            `*`, `?`, `[` and a backslash; in a bucket no `#`.
        seed: seed of all random draws.
    """

    run_dir: str
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    mesh: MeshConfig = MeshConfig()
    prepare: PrepareConfig = PrepareConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    traffic: TrafficConfig = TrafficConfig()
    serve: ServeConfig = ServeConfig()
    card: CardConfig = CardConfig()

    def __post_init__(self) -> None:
        known = "://" not in self.run_dir.removeprefix(SCHEME)
        require(known, "run_dir", self.run_dir, "a folder, or a bucket's gs://BUCKET/FOLDER")

    @property
    def run_folder(self) -> disk.Path:
        """The run's folder."""
        return disk.path_of(self.run_dir)

    def folder(self, verb: str) -> disk.Path:
        """Returns the output folder of a verb, e.g. `runs/quickstart/features`."""
        return self.run_folder / FOLDERS[verb]
