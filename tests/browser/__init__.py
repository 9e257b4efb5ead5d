"""The notebooks and the exported report in a real browser."""

import pytest

pytest.register_assert_rewrite("tests.browser.pages")
