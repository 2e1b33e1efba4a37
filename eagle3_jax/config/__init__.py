"""Run configuration: one YAML file per run, one frozen dataclass per verb, every check of a value.

`load` reads the YAML, applies dotted command-line overrides, and validates the whole before any verb begins work.
Unknown keys, wrong types and impossible combinations are refused by field name.
"""

from eagle3_jax.config.checks import ConfigError
from eagle3_jax.config.data import (
    CloudDlpConfig,
    ConversationsSource,
    ExtractConfig,
    FleetServer,
    JsonlSource,
    PackagedSource,
    PrepareConfig,
    RegenerateConfig,
    SelfSource,
    Source,
    TfdsSource,
)
from eagle3_jax.config.models import DraftConfig, DraftTree, FewBits, MeshConfig, TargetConfig, Weights
from eagle3_jax.config.run import FOLDERS, SPLITS, RunConfig
from eagle3_jax.config.run_file import from_dict, load, to_dict, with_overrides
from eagle3_jax.config.serving import (
    AdaptConfig,
    BenchmarkConfig,
    CardConfig,
    EvaluateConfig,
    ExportConfig,
    ServeConfig,
    TrafficConfig,
)
from eagle3_jax.config.training import TrainConfig
