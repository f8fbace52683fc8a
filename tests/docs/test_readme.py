"""What the README shows must work as it stands there."""

import re
import sqlite3
from pathlib import Path

import pytest

from journal.events import HoldRequested, ReleaseRequested
from tests.loop_driver import LoopDriver, settings_of

README = (Path(__file__).parents[2] / "README.md").read_text()
RECIPES = re.findall(r"```sql\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with requests that finished, were refused, were held, lived through a death, and
    were sent again after it.
    """
    folder = tmp_path_factory.mktemp("readme")
    driver = LoopDriver(folder, settings_of(fake__context_tokens=64))
    driver.submit("first", 4)
    driver.run_until_idle()
    driver.submit("second", 8, content_digest="second")
    driver.submit("too much for this model", 4_000)
    driver.run_until(lambda: any(r.num_output_tokens > 2 for r in driver.state.requests.values()))
    driver.restart()
    driver.submit("second", 8, content_digest="second")  # its client comes back
    driver.run_until_idle()
    held = driver.submit("third", 8)
    driver.run_until(lambda: len(held.tokens) > 2)
    driver.sensors.wish(HoldRequested(request_id=held.request_id))
    driver.run_until_idle()
    driver.sensors.wish(ReleaseRequested(request_id=held.request_id))
    driver.run_until_idle()
    return folder / "journal.db"


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_answers(recipe: str, journal: Path) -> None:
    connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True)
    try:
        rows = connection.execute(recipe).fetchall()
    finally:
        connection.close()
    assert rows, "the journal has something to answer with"
    assert all(any(value is not None for value in row) for row in rows)
