"""Ids are cut as long as they differ, and understood as far as they name one."""

import pytest

from tools.request_ids import UnknownRequest, is_whole, meant, shortest

IDS = ["req_aaaaaa" + "0" * 20, "req_aaaaab" + "0" * 20, "req_aaaaaab" + "0" * 19]


def test_ids_are_cut_at_the_length_at_which_they_differ() -> None:
    assert shortest(IDS[:2]) == {IDS[0]: "req_aaaaaa", IDS[1]: "req_aaaaab"}
    assert set(shortest(IDS).values()) == {"req_aaaaaa0", "req_aaaaab0", "req_aaaaaab"}
    assert shortest([]) == {}


@pytest.mark.parametrize("given", ["req_aaaaab", "aaaaab", IDS[1]])
def test_as_much_as_names_one_is_enough(given: str) -> None:
    assert meant(given, IDS) == IDS[1]


def test_what_names_none_or_several_is_told() -> None:
    with pytest.raises(UnknownRequest, match="no open request is b: `fermata ps` shows"):
        meant("b", IDS)
    with pytest.raises(UnknownRequest, match="may be any of 2 requests: req_aaaaaa0, req_aaaaaab"):
        meant("aaaaaa", IDS)


def test_a_whole_id_need_not_be_looked_up() -> None:
    assert is_whole(IDS[0])
    assert not is_whole(IDS[0][:-1])
    assert not is_whole("a" * 30)
