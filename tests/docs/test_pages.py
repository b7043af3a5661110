"""The runner of the pages sees what a page gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import Folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setattr(pages, "REPOSITORY", tmp_path)
    folder = Folder(tmp_path)

    def run_page(text: str) -> None:
        page = tmp_path / "page.md"
        page.write_text(text)
        folder.run(page)

    yield run_page
    folder.close()


def test_a_page_that_tells_the_truth_passes(run) -> None:  # type: ignore[no-untyped-def]
    run(
        "<!-- file: one.py -->\n```python\nprint('one', 1)\n```\n"
        "\n<!-- append: one.py -->\n```python\nprint('two')\n```\n"
        "\n```console\n$ python one.py\none   ...\ntwo\n```\n"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("```console\n$ echo two\none\n```\n", "got:\ntwo"),
        ("```console\n$ echo one more\none\n```\n", "got:\none more"),
        ("```console\n$ exit 3\n```\n", "ended with 3"),
        ("```python\nraise LookupError\n```\n", "LookupError"),
    ],
)
def test_a_page_that_does_not_is_found_out(run, said: str, why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError) as caught:
        run(f"text\n\n{said}")

    assert "page.md:3" in str(caught.value)
    assert why in str(caught.value)
