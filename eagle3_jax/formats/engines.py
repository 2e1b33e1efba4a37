"""What tpu-inference, sglang-jax and llama.cpp do with a head: for each property the verdict, and where their code says
so, as file:line. The columns of other engines are in `eagle3` and `blocks.compatibility`.

Read from the wheel tpu-inference 0.32.0 (paths in tpu_inference/; its own classes, as for `MODEL_IMPL_TYPE=auto`), from
sglang-jax's repository at cddbf6f (paths in python/sgl_jax/srt/; the wheel 0.0.2 has no drafts), and from llama.cpp
(src/models/eagle3.cpp at 0274f0f, dflash.cpp at 01b78a1; heads ran in the wheel xllamacpp 2026.10, which is newer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from eagle3_jax.formats.compatibility import FAILS, SILENT, Column

TPU_INFERENCE, SGLANG_JAX, LLAMA_CPP = "tpu-inference", "sglang-jax", "llama.cpp"
VERSIONS: Final = {TPU_INFERENCE: "0.32.0", SGLANG_JAX: "cddbf6f (2026-08)", LLAMA_CPP: "2026.10"}
_TPU, _JAX, _CPP = "0.32.0", "cddbf6f", "2026.10"


def _all(rows: Iterable[str], verdict: str, where: str) -> Column:
    return dict.fromkeys(rows, (verdict, where))


_OTHER_AUX = ("other aux layers", "other aux layers of DeepSeek, the first not 2", "aux layer 0 or n")
_UNSCALED = ("RoPE `linear`", "RoPE `linear`, `rope_theta` not 10000")
_YARN = ("RoPE `yarn`", "RoPE `yarn`, `truncate` false", "RoPE `yarn`, `attention_factor`")
_AUX_OF_DEEPSEEK = ("aux layer 0 of DeepSeek", "aux layer n of DeepSeek")
_HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
_LFM2 = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
_QWEN_AND_OTHERS = (
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM"),
)
_OF_VLLM = ("Qwen3MoeForCausalLM", "GptOssForCausalLM")
_NO_CLASS = ("Gemma3ForCausalLM", "MiMoForCausalLM", *_LFM2)

EAGLE3: Final[Mapping[str, Column]] = {
    TPU_INFERENCE: {
        "EAGLE-3": (_TPU, "models/jax/llama_eagle3.py:341"),
        # The target's class takes (2, n // 2, n - 3), whatever the head says.
        **_all((*_OTHER_AUX, *_AUX_OF_DEEPSEEK), SILENT, "models/jax/llama3.py:340"),
        "aux layers, not three": (FAILS, "models/jax/llama_eagle3.py:161"),
        # A tensor without a place is an error; but `t2d`.
        **_all(("`fc_norm`", "`norm_before_fc`"), FAILS, "models/jax/utils/weight_utils.py:221"),
        "`norm_output`": (SILENT, "models/jax/llama_eagle3.py:205"),
        "either in the form `speculators`": (FAILS, "models/jax/utils/weight_utils.py:221"),
        "`norm_before_residual`": (_TPU, "models/jax/llama_eagle3.py:112"),
        "`qk_norm`": (FAILS, "models/common/model_loader.py:113"),
        "`sliding_window`": (SILENT, "models/jax/llama3.py:184"),
        "RoPE `llama3`": (_TPU, "layers/jax/rope_interface.py:31"),
        # Every scaling is smoothed as Llama 3's.
        **_all((*_UNSCALED, *_YARN), SILENT, "layers/jax/rope_interface.py:190"),
        "`head_dim` of its own": (_TPU, "models/jax/llama3.py:104"),
        # Without `d2t`, and without an LM head, a parameter stays abstract.
        **_all(
            ("whole vocabulary", "the target's LM head", "rows of the target's LM head"),
            FAILS,
            "models/jax/llama_eagle3.py:295",
        ),
        # Its classes hand no states on to EAGLE-3; two targets are left to vLLM's classes, but not the head.
        **_all(_QWEN_AND_OTHERS, FAILS, "spec_decode/jax/eagle3.py:330"),
        **_all(_OF_VLLM, FAILS, "spec_decode/jax/eagle3.py:103"),
        **_all(_NO_CLASS, FAILS, "models/vllm/vllm_model_wrapper.py:280"),
    },
    SGLANG_JAX: {
        "EAGLE-3": (_JAX, "models/llama_eagle3.py:271"),
        # The ids are looked for in the target's config.
        **_all((*_OTHER_AUX, *_AUX_OF_DEEPSEEK), SILENT, "model_executor/model_runner.py:586"),
        "aux layers, not three": (FAILS, "models/llama_eagle3.py:171"),
        "`fc_norm`": (SILENT, "models/llama_eagle3.py:205"),
        "`norm_output`": (SILENT, "models/llama_eagle3.py:218"),
        "either in the form `speculators`": (FAILS, "configs/model_config.py:192"),
        "`norm_before_residual`": (SILENT, "models/llama_eagle3.py:107"),
        "`norm_before_fc`": (SILENT, "models/llama_eagle3.py:205"),
        "`qk_norm`": (SILENT, "models/llama_eagle3.py:271"),
        "`sliding_window`": (SILENT, "models/llama.py:172"),
        "RoPE `llama3`": (_JAX, "layers/embeddings.py:679"),
        **_all(_UNSCALED, FAILS, "layers/embeddings.py:720"),
        "RoPE `yarn`": (_JAX, "layers/embeddings.py:696"),
        "RoPE `yarn`, `truncate` false": (SILENT, "layers/embeddings.py:751"),
        "RoPE `yarn`, `attention_factor`": (SILENT, "layers/embeddings.py:703"),
        "`head_dim` of its own": (_JAX, "models/llama.py:232"),
        "not as wide as the target": (FAILS, "models/llama.py:608"),
        "whole vocabulary": (FAILS, "models/llama_eagle3.py:256"),
        "the target's LM head": (_JAX, "models/llama_eagle3.py:247"),
        "rows of the target's LM head": (SILENT, "models/llama_eagle3.py:248"),
        **_all((*_QWEN_AND_OTHERS, *_OF_VLLM, *_NO_CLASS, *_HYBRIDS), FAILS, "model_executor/model_runner.py:592"),
        "Qwen3ForCausalLM": (_JAX, "models/qwen3.py:564"),
    },
    LLAMA_CPP: {
        "EAGLE-3": (_CPP, "eagle3.cpp:load_arch_tensors"),
        "other aux layers": (_CPP, "eagle3.cpp:load_arch_hparams"),
        "aux layers, not three": (FAILS, "eagle3.cpp:load_arch_hparams"),
        "`fc_norm`": (FAILS, "eagle3.cpp:load_arch_tensors"),
        "`norm_output`": (SILENT, "eagle3.cpp:graph<false>"),
        "either in the form `speculators`": (FAILS, "eagle3.cpp:load_arch_tensors"),
        "`norm_before_residual`": (_CPP, "eagle3.cpp:load_arch_hparams"),
        "`norm_before_fc`": (_CPP, "a key of the wheel"),
        "`qk_norm`": (FAILS, "eagle3.cpp:load_arch_tensors"),
        "`sliding_window`": (SILENT, "eagle3.cpp:load_arch_hparams"),
        "RoPE `llama3`": (_CPP, "eagle3.cpp:load_arch_tensors"),
        **_all(_UNSCALED, _CPP, "eagle3.cpp:graph<false>"),
        "`head_dim` of its own": (_CPP, "eagle3.cpp:load_arch_tensors"),
        "whole vocabulary": (_CPP, "eagle3.cpp:load_arch_tensors"),
        "the target's LM head": (_CPP, "eagle3.cpp:graph<false>"),
        "rows of the target's LM head": (FAILS, "eagle3.cpp:graph<false>"),
    },
}
_WRAPPED = ("both in the form `speculators`", "causal full layers in the form `speculators`")
_BOUNDED = ("draft vocabulary", "draft vocabulary, no LM head")
_CAUSALITIES, _NARROW = "causal and bidirectional layers", "`hidden_size` below k (k + 1), k = `selector_top_k`"
_MASKS = ("full and sliding layers", "sliding layers", "causal full layers", _CAUSALITIES)
_SCALED = ("RoPE `llama3`, `linear` or `yarn`", "RoPE `yarn`, `attention_factor`")
BLOCKS: Final[Mapping[str, Column]] = {
    TPU_INFERENCE: {
        "DFlash": (_TPU, "models/jax/dflash.py:535"),
        "DSpark": (FAILS, "spec_decode/jax/eagle3.py:330"),
        **_all(("DFlash2", _NARROW), FAILS, "models/common/model_loader.py:113"),
        "several layers": (_TPU, "models/jax/dflash.py:345"),
        **_all((*_BOUNDED, "draft vocabulary of DFlash2"), FAILS, "models/jax/utils/weight_utils.py:221"),
        **_all(_MASKS, SILENT, "models/jax/dflash.py:201"),
        **_all(_WRAPPED, FAILS, "models/common/model_loader.py:113"),
        **_all(("RoPE, as config.json has it", *_SCALED), SILENT, "models/jax/dflash.py:325"),
        "`head_dim` not 64 or a multiple of 128": (FAILS, "models/jax/dflash.py:119"),
    },
    SGLANG_JAX: {
        "DFlash": (_JAX, "models/dflash.py:407"),
        "DSpark": (FAILS, "server_args.py:1490"),
        **_all(("DFlash2", _NARROW), SILENT, "speculative/dflash_worker.py:109"),
        "several layers": (_JAX, "models/dflash.py:287"),
        **_all(_BOUNDED, SILENT, "speculative/dflash_worker.py:119"),
        "draft vocabulary of DFlash2": (SILENT, "speculative/dflash_worker.py:109"),
        **_all(_MASKS, SILENT, "models/dflash.py:108"),
        **_all(_WRAPPED, FAILS, "configs/model_config.py:192"),
        "RoPE, as config.json has it": (_JAX, "models/dflash.py:98"),
        **_all(_SCALED, SILENT, "models/dflash.py:94"),
        "`head_dim` not 64 or a multiple of 128": (_JAX, "models/dflash.py:37"),
    },
    LLAMA_CPP: {
        "DFlash": (_CPP, "dflash.cpp:load_arch_tensors"),
        "DSpark": (_CPP, "dflash.cpp:load_arch_tensors"),
        "DFlash2": (_CPP, "dflash.cpp:load_arch_tensors"),
        "several layers": (_CPP, "dflash.cpp:load_arch_tensors"),
        "draft vocabulary": (_CPP, "dflash.cpp:load_arch_tensors"),
        "draft vocabulary, no LM head": (FAILS, "dflash.cpp:load_arch_tensors"),
        **_all(("draft vocabulary of DFlash2", _NARROW), FAILS, "dflash.cpp:load_arch_tensors"),
        _CAUSALITIES: (FAILS, "a key of the wheel for all layers"),
        "causal full layers": (_CPP, "a key of the wheel"),
        **_all(("full and sliding layers", "sliding layers"), _CPP, "dflash.cpp:load_arch_hparams"),
        **_all(_WRAPPED, FAILS, "dflash.cpp:load_arch_tensors"),
        "RoPE, as config.json has it": (_CPP, "dflash.cpp:load_arch_hparams"),
        **_all(_SCALED, SILENT, "dflash.cpp:load_arch_tensors"),
        "`head_dim` not 64 or a multiple of 128": (_CPP, "dflash.cpp:load_arch_tensors"),
    },
}
MTP_ROWS = (
    *("MTP of MiMo", "MTP of DeepSeek-V3", "MTP of GLM-4.5", "MTP of DeepSeek-V3.2", "MTP of GLM-5"),
    "MTP of Qwen 3.5, Qwen3-Next",
)
MTP: Final[Mapping[str, Column]] = {
    TPU_INFERENCE: _all(MTP_ROWS, FAILS, "spec_decode/jax/eagle3.py:330"),
    SGLANG_JAX: {
        MTP_ROWS[0]: (FAILS, "models/mimo_mtp.py:262"),  # embeddings and LM head must be in the folder
        **_all(MTP_ROWS[1:], FAILS, "configs/model_config.py:189"),
    },
    LLAMA_CPP: _all(MTP_ROWS, FAILS, "the layer lies in the target's own file"),
}
EAGLE2: Final[Mapping[str, Column]] = {
    TPU_INFERENCE: {"EAGLE-2": (FAILS, "spec_decode/jax/eagle3.py:330")},
    SGLANG_JAX: {"EAGLE-2": (FAILS, "models/llama_eagle3.py:246")},
    LLAMA_CPP: {"EAGLE-2": (FAILS, "eagle3.cpp:load_arch_hparams")},
}
