"""Python imports this at its start, in a process that a test starts.

No verb needs PyTorch, and transformers' import of it takes 2 s of each process. JAX's cache gets whole files: a process
that is killed in the middle of one would leave it to all later runs.
"""

import importlib.machinery
import sys


class AsTestsNeedIt(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "torch":
            return None
        spec = super().find_spec(fullname, path, target)
        if fullname == "jax._src.lru_cache" and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module):
                import compilation_cache

                execute(module)
                compilation_cache.write_entries_atomically(module)

            spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = AsTestsNeedIt
