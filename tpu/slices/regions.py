"""What it costs to train in another region than the bucket's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# US dollars a GB that a Google service reads from, or writes to, another region: list prices of data transfer within
# Google Cloud, as https://cloud.google.com/storage/pricing#network-buckets and
# https://cloud.google.com/vpc/network-pricing have them. Between two continents the dearer one counts. They change
# seldom, and only an estimate is made of them.
_WITHIN = {"North America": 0.02, "Europe": 0.02}
_WITHIN_OTHERS = 0.08
_ACROSS = {
    "North America": 0.05,
    "Europe": 0.05,
    "Asia": 0.08,
    "Oceania": 0.10,
    "the Middle East": 0.11,
    "Africa": 0.11,
    "South America": 0.14,
}
_DEAREST = max(_ACROSS.values())
# What is read from a multi-region bucket by a region of its own; writing to it is free.
_FROM_MULTI_REGION = 0.02

_CONTINENTS = {
    "us": "North America",
    "northamerica": "North America",
    "southamerica": "South America",
    "europe": "Europe",
    "asia": "Asia",
    "australia": "Oceania",
    "me": "the Middle East",
    "africa": "Africa",
}
# Multi-regions: the beginning of the names of the regions that each may keep its data in.
_MULTI_REGIONS = {"US": ("us-",), "EU": ("europe-",), "ASIA": ("asia-",)}
# Dual-regions with names of their own; of others the service tells the two regions.
_DUAL_REGIONS = {
    "NAM4": ("us-central1", "us-east1"),
    "EUR4": ("europe-north1", "europe-west4"),
    "EUR5": ("europe-west1", "europe-west2"),
    "EUR7": ("europe-west2", "europe-west3"),
    "EUR8": ("europe-west3", "europe-west6"),
    "ASIA1": ("asia-northeast1", "asia-northeast2"),
}


@dataclass(frozen=True)
class BucketHome:
    """Where a bucket is: in `regions`, or, of a multi-region, anywhere in a part of the world."""

    name: str
    regions: tuple[str, ...]

    @property
    def multi_region(self) -> bool:
        return not self.regions


@dataclass(frozen=True)
class Crossing:
    """What a GB costs, in US dollars, that a slice reads from the bucket or writes to it.

    `abroad` is False where a multi-region bucket is read from a region of its own: that costs, too, but nobody could
    be nearer.
    """

    read: float
    write: float
    abroad: bool

    def dollars(self, read_gb: float, written_gb: float) -> float:
        return self.read * read_gb + self.write * written_gb


def bucket_home(location: str, data_locations: Sequence[str]) -> BucketHome:
    """Where a bucket is, of what the storage service says of it: its location, and the two of a dual-region."""
    name = location.upper()
    if data_locations:
        return BucketHome(name, tuple(one.lower() for one in data_locations))
    if name in _MULTI_REGIONS:
        return BucketHome(name, ())
    return BucketHome(name, _DUAL_REGIONS.get(name, (name.lower(),)))


def crossing(home: BucketHome, region: str) -> Crossing | None:
    """What it costs to train in `region`; None if the bucket is there."""
    if region in home.regions:
        return None
    if home.multi_region and region.startswith(_MULTI_REGIONS[home.name]):
        return Crossing(_FROM_MULTI_REGION, 0.0, abroad=False)
    price = _price(continent(home.regions[0]) if home.regions else continent(home.name), continent(region))
    return Crossing(price, price, abroad=True)


def continent(place: str) -> str | None:
    """The continent of a region or multi-region; None if we do not know it."""
    return {"EU": "Europe"}.get(place) or _CONTINENTS.get(place.lower().partition("-")[0])


def _price(one: str | None, other: str | None) -> float:
    if one is None or other is None:
        return _DEAREST
    if one == other:
        return _WITHIN.get(one, _WITHIN_OTHERS)
    return max(_ACROSS[one], _ACROSS[other])
