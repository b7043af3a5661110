"""`python -m tests.audit`: known vulnerabilities in what installing celery_claim brings along.

Only the package's own requirements are looked at, as they are installed here: a fault in a development
tool is no fault of ours. Where the service cannot be reached this says so and passes, because a network
says nothing about the code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import PackageNotFoundError, distribution

#: A version that has known vulnerabilities: a mirror that serves packages but not this knows none at all.
PROBE = "https://pypi.org/pypi/pip/22.0/json"
EXTRAS = ("mysql", "postgresql", "demo")


def installed_requirements(name: str, extras: tuple[str, ...] = ()) -> dict[str, str]:
    """Name and version of every distribution that `name` needs, directly or not, and that is installed."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = [(name, extras)]
    while waiting:
        current, wanted = waiting.pop()
        for line in distribution(current).requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                continue
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if key in found:
                continue
            try:
                found[key] = distribution(key).version
            except PackageNotFoundError:
                continue
            waiting.append((key, tuple(requirement.extras)))
    return found


def main() -> int:
    try:
        with urllib.request.urlopen(PROBE, timeout=10) as answer:
            known = json.load(answer).get("vulnerabilities")
    except (OSError, ValueError) as error:
        known = error
    if not isinstance(known, list) or not known:
        print(f"audit: left out, {PROBE} does not tell vulnerabilities ({known})")
        return 0
    pins = installed_requirements("celery-claim", EXTRAS)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.writelines(f"{name}=={version}\n" for name, version in sorted(pins.items()))
        requirements.flush()
        command = ["--requirement", requirements.name, "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        return subprocess.run([sys.executable, "-m", "pip_audit", *command]).returncode


if __name__ == "__main__":
    sys.exit(main())
