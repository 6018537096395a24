"""The page of faults names the tests that there are, and all of those that say they cover one."""

from faults_page import PAGE, covered, page_with


def test_the_page_of_faults_is_what_the_tests_say() -> None:
    page = PAGE.read_text()
    assert page == page_with(covered(), page), "run `python tests/faults_page.py`, and give new ids their words"
    assert "| ? |" not in page
