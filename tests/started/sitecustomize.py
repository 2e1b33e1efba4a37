"""Python imports this at its start. No verb needs PyTorch, and transformers' import of it takes 2 s of each process."""

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules["torch"] = None
