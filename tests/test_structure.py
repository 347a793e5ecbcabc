"""The tree is what its documents say; ``make check`` runs more such checks."""

from __future__ import annotations

import check_tree
import settings_page


def test_structure_page_lists_every_module() -> None:
    assert check_tree.check_structure(check_tree.ROOT, check_tree.tracked(check_tree.ROOT)) == []


def test_imports_stay_in_their_places() -> None:
    assert check_tree.check_imports(check_tree.ROOT, check_tree.tracked(check_tree.ROOT)) == []


def test_no_module_hides_a_public_function() -> None:
    assert check_tree.check_module_names(check_tree.ROOT, check_tree.tracked(check_tree.ROOT)) == []


def test_settings_page_agrees_with_the_options() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()
