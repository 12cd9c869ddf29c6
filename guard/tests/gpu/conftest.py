"""Set-up of the GPU tests, as of the other ones."""

from tests.gpu.conftest import memory_given_back  # noqa: F401  # a fixture of every file
