"""The project's token bucket of creations."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices.creation_rate import (
    API_LIMIT_A_MINUTE,
    MOST_PROMISED,
    RateLimit,
    Tokens,
    emptied,
    from_json,
    reserved,
    to_json,
)

LIMIT = RateLimit()


@given(st.lists(st.floats(0, 20), min_size=1, max_size=300))
def test_V5_in_no_minute_there_are_more_creations_than_the_api_allows(gaps: list[float]):
    tokens, now, sent = None, 1000.0, []
    for gap in gaps:
        now += gap
        tokens, wait_s = reserved(tokens, LIMIT, now)
        sent.append(now + wait_s)
    sent.sort()
    for first, moment in enumerate(sent):
        within = sum(moment <= other < moment + 60.0 for other in sent[first:])
        assert within <= API_LIMIT_A_MINUTE


def test_V5_those_who_come_at_once_go_one_after_the_other():
    tokens, waits = None, []
    for _ in range(200):
        tokens, wait_s = reserved(tokens, LIMIT, 0.0)
        waits.append(wait_s)
    assert waits[: int(LIMIT.burst)] == [0.0] * int(LIMIT.burst)
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx((200 - LIMIT.burst) * 60 / LIMIT.a_minute)


def test_V5_after_a_refusal_nobody_creates_before_the_bucket_is_refilled():
    tokens = emptied(Tokens(5.0, 10.0), 10.0)
    assert reserved(tokens, LIMIT, 10.0)[1] == pytest.approx(60 / LIMIT.a_minute)
    assert reserved(emptied(None, 10.0), LIMIT, 20.0)[1] == 0.0


def test_a_clock_that_is_behind_gets_no_tokens_twice():
    tokens, _ = reserved(Tokens(0.0, 100.0), LIMIT, 90.0)
    assert tokens.at == 100.0
    _, wait_s = reserved(Tokens(0.0, 100.0), LIMIT, 90.0)
    assert wait_s == pytest.approx(10.0 + 60 / LIMIT.a_minute)


def test_a_clock_far_ahead_is_not_believed():
    _, wait_s = reserved(Tokens(0.0, 10_000.0), LIMIT, 0.0)
    assert wait_s == pytest.approx(60 / LIMIT.a_minute)
    assert emptied(Tokens(0.0, 10_000.0), 0.0).at == 0.0


@pytest.mark.parametrize(("a_minute", "burst"), [(0.0, 5.0), (5.0, 0.0), (80.0, 12.0)])
def test_a_rate_that_the_api_would_refuse_is_refused(a_minute: float, burst: float):
    with pytest.raises(ValueError, match="creation rate"):
        RateLimit(a_minute, burst)


@pytest.mark.parametrize("tokens", [None, Tokens(-3.5, 1e9)])
def test_tokens_as_json(tokens: Tokens | None):
    assert from_json(json.loads(json.dumps(to_json(tokens)))) == tokens


@pytest.mark.parametrize("left", ["-1e9", "1e9", "NaN", "-Infinity"])
@pytest.mark.parametrize("at", ["0", "1e300", "NaN", "Infinity"])
def test_nobody_waits_for_a_file_that_nobody_can_have_written(left: str, at: str):
    found = from_json(json.loads(f'{{"left": {left}, "at": {at}}}'))
    tokens, wait_s = reserved(found, LIMIT, 1000.0)
    assert wait_s == 0.0
    # The next one who looks finds it mended.
    assert from_json(json.loads(json.dumps(to_json(tokens)))) == tokens


def test_what_we_write_is_ours_however_many_wait():
    tokens, waits = None, [0.0]
    for _ in range(int(2 * MOST_PROMISED)):
        tokens, wait_s = reserved(tokens, LIMIT, 0.0)
        waits.append(wait_s)
    assert from_json(to_json(tokens)) == tokens
    assert max(waits) == MOST_PROMISED * 60 / LIMIT.a_minute
