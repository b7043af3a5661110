"""The reference names everything that exists, and nothing that does not."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import celery_claim
from celery_claim import ClaimTask, Status, exceptions, signals
from celery_claim.bin import _COMMANDS, FAILED, LOST_RACE, UNAVAILABLE, USAGE
from celery_claim.bootsteps import EXIT_CONFIGURATION
from celery_claim.claims.sql.columns import ROLES
from celery_claim.options import _EXPECTED
from celery_claim.settings import Settings, known
from celery_claim.streams.options import CONNECTION_RULES, REPLACED, RULES, StreamOptions
from celery_claim.streams.wire.keys import Keys
from tests.docs.pages import DOCS, LANGUAGES, REPOSITORY, blocks, pages

REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """The Sphinx extension that reads the tables of the reference off the code."""
    pytest.importorskip("sphinx", reason="the documentation is built with the extra [dev]")
    sys.path.insert(0, str(DOCS / "_ext"))
    yield importlib.import_module("claim_reference")
    sys.path.remove(str(DOCS / "_ext"))


def rows_of(markdown: str) -> dict[str, list[str]]:
    """Name in the first cell -> the other cells, of every table in a text."""
    lines = [line for line in markdown.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_setting_is_listed_with_its_default_and_unit(tables: ModuleType) -> None:
    shown = rows_of(tables.settings())

    assert set(shown) == set(known())
    for each in fields(Settings):
        default, unit, meaning, accepted = shown[f"claim_{each.name}"]
        assert default == f"`{getattr(Settings(), each.name)!r}`"
        assert unit == (each.metadata["unit"] or "-")
        assert meaning
        assert accepted


def test_every_number_of_the_settings_has_a_unit() -> None:
    numbers = [each for each in fields(Settings) if type(getattr(Settings(), each.name)) in (int, float)]

    assert [each.name for each in numbers if not each.metadata["unit"]] == []


def test_every_option_is_listed_with_its_default_and_what_it_accepts(tables: ModuleType) -> None:
    shown = rows_of(tables.options())

    assert set(_EXPECTED) <= set(shown)
    for name, (default, accepted, meaning) in shown.items():
        assert default == f"`{getattr(ClaimTask, name)!r}`"
        assert accepted
        assert meaning


def test_every_option_of_the_class_is_in_the_reference(tables: ModuleType) -> None:
    celerys = {"abstract", "typing", "ignore_result", "send_events"}
    annotated = {name for name in ClaimTask.__annotations__ if not name.startswith("_")}

    assert annotated - celerys <= set(tables.option_names())


def test_every_transport_option_is_listed_with_its_default_and_what_it_accepts(tables: ModuleType) -> None:
    shown = rows_of(tables.stream_options())

    assert set(shown) == set(RULES)
    for name, (default, accepted, meaning) in shown.items():
        assert default == f"`{StreamOptions.__dataclass_fields__[name].default!r}`"
        assert accepted
        assert meaning
    assert set(rows_of(tables.connection_options())) == set(CONNECTION_RULES)
    assert set(rows_of(tables.replaced_options())) == set(REPLACED)


def test_every_key_of_the_broker_is_explained() -> None:
    listed = set(re.findall(r"`(cs1:[^`]+)`|`:(p\d)`", (REFERENCE / "streams.md").read_text()))
    keys = Keys()
    shown = {name or f"cs1:{{QUEUE}}:{step}" for name, step in listed}

    assert shown == {
        *keys.of_queue("QUEUE"), keys.dead("QUEUE"), keys.fanout("EXCHANGE"), keys.bindings("EXCHANGE"),
        keys.exchanges, keys.queues,
    }  # fmt: skip


def test_every_column_is_explained(tables: ModuleType) -> None:
    shown = rows_of((REFERENCE / "columns.md").read_text())

    assert set(shown) == set(ROLES)
    assert set(rows_of(tables.columns())) == set(ROLES) - {"created_time"}


def test_every_status_is_explained(tables: ModuleType) -> None:
    names = {status.name for status in Status}

    assert set(rows_of((REFERENCE / "statuses.md").read_text())) == names
    assert {name: int(cells[0]) for name, cells in rows_of(tables.statuses()).items()} == {
        s.name: int(s) for s in Status
    }


def test_every_signal_is_listed_with_its_payload(tables: ModuleType) -> None:
    shown = rows_of(tables.signal_list())
    sent = {name: signal for name, signal in vars(signals).items() if isinstance(signal, signals.Signal)}

    assert set(shown) == set(sent)
    for name, signal in sent.items():
        assert [word for word in signal.providing_args if f"`{word}`" not in shown[name][0]] == []


def test_every_command_is_listed(tables: ModuleType) -> None:
    assert re.findall(r"^## (\w+)$", tables.commands(), re.MULTILINE) == sorted(_COMMANDS)


def test_every_exit_code_is_listed() -> None:
    page = (REFERENCE / "cli.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}

    assert listed == {0, FAILED, 2, USAGE, UNAVAILABLE, LOST_RACE, EXIT_CONFIGURATION}


def test_every_finding_of_check_is_listed_with_its_level() -> None:
    sources = [REPOSITORY / "celery_claim" / "claims" / "check.py", REPOSITORY / "celery_claim" / "checking.py"]
    found = {
        (call.args[1].value, call.args[0].value)
        for source in sources
        for call in ast.walk(ast.parse(source.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding"
        for first, second in [call.args[:2]]
        if isinstance(first, ast.Constant) and isinstance(second, ast.Constant)
    }
    listed = {
        (code, cells[0]) for code, cells in rows_of((REFERENCE / "cli.md").read_text()).items() if len(cells) == 2
    }

    assert found
    assert listed == found


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    named = set(re.findall(r":: celery_claim\.(\w+)", text)) | set(re.findall(r"\b\w*(?:Error|Lost)\b", text))

    assert set(celery_claim.__all__) <= named


def test_every_exception_is_in_the_reference() -> None:
    page = (REFERENCE / "exceptions.md").read_text()
    defined = {
        name
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and value.__module__ == exceptions.__name__
    }

    assert [name for name in sorted(defined) if not re.search(rf"\b{name}\b", page)] == []


def test_every_page_is_reached_from_the_index() -> None:
    entries = re.findall(r"^[\w/*-]+$", (DOCS / "index.md").read_text(), re.MULTILINE)
    reached = {page for entry in entries for page in DOCS.glob(f"{entry}.md")}

    assert set(pages()) - reached == {DOCS / "index.md", REPOSITORY / "README.md"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)

    assert broken == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_block_is_in_a_language_that_is_run_or_only_shown(page: Path) -> None:
    assert [block.where for block in blocks(page) if block.mark != "stop" and block.language not in LANGUAGES] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.code, block.where, "exec")


def test_nothing_of_the_tutorial_is_left_out_of_the_run() -> None:
    left_out = [
        block.where
        for page in DOCS.glob("tutorial/*.md")
        for block in blocks(page)
        if block.mark in ("skip", "fragment")
    ]

    assert left_out == []


def test_planned_names_do_not_exist_yet() -> None:
    for name in ("RangeTask", "QueuedTask", "Deliver"):
        assert not hasattr(celery_claim, name), f"{name} exists now: document it, and take it off the list of plans"


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
