"""The check that tests leave no files in the repository."""

from pathlib import Path

from tests.conftest import UntouchedRepository


def test_files_that_a_test_leaves_in_the_repository_are_found(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    repository = UntouchedRepository(tmp_path)
    assert repository.left == []

    (tmp_path / ".pytest_cache").mkdir()
    (tmp_path / "r.json").touch()

    assert repository.left == ["r.json"]


def test_a_report_that_the_command_line_names_is_no_left_file(tmp_path: Path) -> None:
    repository = UntouchedRepository(tmp_path, ["-q", "--junitxml=report.xml"])

    (tmp_path / "report.xml").touch()
    (tmp_path / ".coverage").touch()

    assert repository.left == []
