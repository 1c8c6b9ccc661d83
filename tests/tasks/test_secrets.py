import pytest

from tasks.secrets import SecretTooShort, load_secrets


async def test_a_secret_that_logs_could_not_keep_is_refused(monkeypatch: pytest.MonkeyPatch):
    for value in ("q7", " zq8\n"):
        monkeypatch.setenv("MY_PIN", value)
        with pytest.raises(SecretTooShort, match="secret PIN has fewer than 4 characters") as refused:
            await load_secrets({"PIN": "env:MY_PIN"})
        assert value.strip() not in str(refused.value)


@pytest.mark.parametrize("value", ["", "abcd"])
async def test_an_empty_secret_and_a_long_one_are_taken(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("MY_PIN", value)
    assert await load_secrets({"PIN": "env:MY_PIN"}) == {"PIN": value}
