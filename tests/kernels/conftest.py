"""The oracles lie beside the tests of the kernels: `import policy_oracle`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("head_oracle", "policy_oracle")
