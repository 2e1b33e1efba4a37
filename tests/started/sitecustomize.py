"""Python imports this at its start. No verb needs PyTorch, and transformers' import of it takes 2 s of each process."""

import importlib.machinery
import sys


class WithoutPyTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutPyTorch
