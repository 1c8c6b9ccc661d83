"""The table of all slices: what each is, who has it, and what it costs."""

from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.fleet import MOST_ROWS, fleet_rows, fleet_summary
from tpu.slices.lease import Claim, Holder, Lease

SPOT = Candidate("us-central2-b", "v4-8", "spot", 4.0)
AT = 1_000_000_000.0  # 2001-09-09 01:46:40 UTC


def made(name: str, candidate: Candidate = SPOT, pool: str = "default") -> Lease:
    return leases.intend(name, pool, candidate, 4, "c", AT)


def ready(name: str, candidate: Candidate = SPOT) -> Lease:
    return leases.ready(made(name, candidate), AT)


def cells(lease: Lease, *columns: str, now: float = AT + 600) -> list[str]:
    (row,) = fleet_rows([lease], now)
    return [row[column] for column in columns]


def test_a_row_says_what_a_slice_is_who_has_it_since_when_and_what_it_costs():
    lease = leases.take(ready("s"), Holder("icl-3", "u", (0, 1, 2, 3)), AT + 60)
    assert fleet_rows([lease], AT + 600) == [
        {
            "slice": "s", "state": "in use", "who has it": "icl-3", "since (UTC)": "01:47", "an hour": "$4.00",
            "type": "spot v4-8", "zone": "us-central2-b", "pool": "default",
        }
    ]  # fmt: skip


def test_every_state_and_every_kind_of_holder():
    shared = leases.take(ready("s"), Holder("a", "ua", (0, 1)), AT + 60)
    shared = leases.claim(shared, Claim("b", "ub", 5, (0, 1), due=True), AT + 90)
    assert cells(shared, "state", "who has it") == ["in use", "a: chips 0, 1; free: chips 2, 3; wanted by b"]
    assert cells(ready("s"), "state", "who has it", "since (UTC)") == ["idle", "nobody", "01:46"]
    assert cells(ready("s"), "since (UTC)", now=AT + 86400) == ["09-09 01:46"]
    # Who only sees to its creation uses no chip of it.
    making = leases.take(made("s"), Holder("a", "ua", ()), AT)
    assert cells(making, "state", "who has it") == ["being made", "nobody"]
    bad = leases.quarantine(ready("s"), "busy chips")
    assert cells(bad, "state") == ["to be deleted: busy chips"]


def test_the_summary_counts_what_is_there_and_what_it_costs():
    used = leases.take(ready("a"), Holder("r", "u", (0, 1)), AT)
    free = ready("b", Candidate("us-east1-d", "v6e-8", "on-demand"))
    past = leases.gone(ready("c"), "deleted", AT)
    there = [used, free, past, made("d")]
    assert fleet_summary(there, "gs://b", AT) == (
        "3 slices of gs://b, 1 of them being made; $4.00 an hour, $2.00 of it idle; no price of on-demand v6e-8 in "
        "us-east1-d. As of 09-09 01:46 UTC."
    )
    assert [row["slice"] for row in fleet_rows(there, AT)] == ["a", "b", "d"]
    assert [row["an hour"] for row in fleet_rows(there, AT)] == ["$4.00", "not set", "$4.00"]
    assert fleet_summary([past], "gs://b", AT) == "0 slices of gs://b. As of 09-09 01:46 UTC."


def test_a_table_is_never_empty_and_never_endless():
    (none,) = fleet_rows([], AT)
    assert none["slice"] == "no slices"
    rows = fleet_rows([made(f"s{number:04}") for number in range(MOST_ROWS + 7)], AT)
    assert len(rows) == MOST_ROWS + 1
    assert rows[-1]["slice"].startswith("and 7 more")
    assert all(set(row) == set(none) for row in rows)
