"""The upstream tests: out of the source distributions of the versions that are installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

from .catalogue import Suite

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "celery_claim" / "sdists"
SCHEME = Path(__file__).with_name("scheme.py")


def tests_of(suite: Suite, into: Path) -> Path:
    """A folder with the tests of a suite and their settings, in which nothing is importable as celery or kombu."""
    tree = _sdist(suite.distribution)
    folder = into / suite.name
    folder.mkdir()
    shutil.copytree(tree / "t", folder / "t")
    for name in ("pyproject.toml", "setup.cfg"):
        if (tree / name).exists():
            shutil.copy(tree / name, folder)
    shutil.copy(SCHEME, folder / "test_scheme.py")
    return folder


def _sdist(distribution: str) -> Path:
    name = f"{distribution}-{version(distribution)}"
    if not (CACHE / name / "t").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(CACHE),
                f"{distribution}=={version(distribution)}",
            ],
            check=True,
        )  # fmt: skip
        with tarfile.open(CACHE / f"{name}.tar.gz") as archive:
            archive.extractall(CACHE, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    if not (CACHE / name / "t").is_dir():
        raise SystemExit(f"the source distribution of {name} has no tests (t/): name another version")
    return CACHE / name
