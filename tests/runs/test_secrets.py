"""Secrets are masked by the names of keys and in URLs; what is no secret stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.runs.printing import printable
from trainwright.runs.records import Ended, Found, Started, from_json, to_json
from trainwright.runs.secrets import MASK, is_secret, masked, masked_code, masked_paths

SECRET = (
    *("token", "hf_token", "hfToken", "HF_TOKEN", "use_auth_token", "data.train.args.token", "api_key", "apiKey"),
    *("API_KEY", "x-api-key", "access_key", "AWS_SECRET_ACCESS_KEY", "password", "db-password", "passwd", "auth"),
    *("secret", "clientSecret", "credentials", "Authorization", "private_key"),
)
HARMLESS = (
    *("tokenizer", "tokens", "num_tokens", "max_tokens", "pad_token", "eos_token", "mask_token", "token_ids", "key"),
    *("key_dim", "num_key_value_heads", "author", "passes", "keyboard", "monkey", "lr", "", "webhook", "bypass"),
)


@pytest.mark.parametrize("key", SECRET)
def test_keys_of_secrets(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize("key", HARMLESS)
def test_keys_of_no_secrets(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    "text",
    [
        "--set data.train.args.token=hunter2 --lr 3",
        "--set=data.train.args.token=hunter2",
        "--set a.password='hunter2 and more' --lr 3",
        "--token hunter2",
        "--token=hunter2",
        "model.args={token: hunter2, size: 2}",
        "model.args={size: 2, 'api_key': 'hunter2'}",
        '{"token": "hunter2"}',
        "Authorization: Bearer hunter2",
        "https://user:hunter2@host/path",
        "https://hunter2@host",
        "cannot reach postgresql://me:hunter2@db:5432/x: refused",
        "https://user:p@hunter2@host/path",
        "https://host/path?access_token=hunter2&page=3",
        "load(url, token='hunter2', split='train')",
        'export HF_TOKEN="hunter2"',
    ],
)
def test_secrets_in_text(text: str) -> None:
    hidden = masked(text)
    assert MASK in hidden and "hunter2" not in hidden
    assert masked(hidden) == hidden
    kept = [
        word
        for word in ("--lr 3", "size: 2", "host/path", "page=3", "split='train'", "db:5432/x: refused")
        if word in text
    ]
    assert all(word in hidden for word in kept)


@pytest.mark.parametrize(
    "text",
    [
        "data.train.args.token: is not an argument of load\n  remedy: leave it out",
        "pad_token=<pad>",
        "git@github.com:me/it.git",
        "mail me@host, see https://host/@me",
        "--set optimizer.lr=0.1 --accept all",
        "the token count is 5",
        "give it again: --set data.train.args.token=..., or write it there",
    ],
)
def test_text_without_secrets_stays(text: str) -> None:
    assert masked(text) == text


def test_secrets_in_values() -> None:
    value: dict[str, Any] = {
        "args": {
            "hf_token": "hunter2",
            "tokens": 3,
            "pad_token": "<pad>",
            "password": 1234,
            "token": None,
            "auth": True,
        },
        "credentials": {"user": "hunter2", "more": ["hunter2", 5]},
        "command": ["train", "--token", "hunter2", "--set", "a.secret=hunter2", "--lr", "3"],
        "urls": ("https://a:hunter2@b", 1),
    }
    hidden: Any = masked(value)
    assert "hunter2" not in str(hidden) and "1234" not in str(hidden)
    assert hidden["args"] == {**value["args"], "hf_token": MASK, "password": MASK}
    assert hidden["command"][-2:] == ["--lr", "3"] and hidden["urls"] == (f"https://{MASK}@b", 1)
    paths = ["args.hf_token", "args.password", "credentials.user", "credentials.more.0", "credentials.more.1"]
    assert [*masked_paths(hidden)] == [*paths, "command.2", "command.4", "urls.0"]
    assert [*masked_paths(value)] == []


def test_records_hold_no_secrets() -> None:
    command = ("trainwright", "train", "--set", "data.train.args.token=hunter2")
    started = to_json(Started(time_s=0.0, step=0, version="0", pid=1, command=command))
    reason = "HTTPError: 401 of https://me:hunter2@host"
    ended = Ended(
        time_s=0.0, ending="failed", reason=reason, step=3, loss=float("nan"), val_loss=None, skipped=0, seconds=1.0
    )
    for line in (started, to_json(ended)):
        assert "hunter2" not in line and MASK in line and from_json(line)


def test_a_record_without_secrets_is_written_as_it_is() -> None:
    found = Found(time_s=0.0, code="x", severity="info", step=1, symptom="a key", cause="b", remedy="token", sure=0.5)
    assert from_json(to_json(found)) == found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\x08\x9b1m", "a\\rb\\x08\\x9b1m"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\ud800 \udcff", "\\ud800 \\udcff"),
        ("\u00e4 \U0001f600 \u4e2d", "\u00e4 \U0001f600 \u4e2d"),
    ],
)
def test_nothing_printed_is_a_command_to_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


@pytest.mark.parametrize(
    "text",
    [
        'api_key = """hunter22"""',
        '    api_key: str = "hunter22"',
        'self.token: str | None = "hunter22"',
        'TOKEN = (\n    "hunter22"\n)',
        'parser.add_argument("--token", default="hunter22")',
        'key = os.environ.get("API_KEY") or "hunter22"',
        f'wandb.login(key="{"0123456789abcdef" * 2}hunter22")'.replace("hunter22", "deadbeef"),
        "model:\n  args:\n    - api_key: hunter22",
        'headers = ["Authorization: Bearer hunter22"]',
        "https://hooks.slack.com/services/T0/B0/hunter22",
        "https://discord.com/api/webhooks/1/hunter22",
        "https://bucket.s3.amazonaws.com/data?X-Amz-Signature=hunter22&x=1",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter22\n-----END RSA PRIVATE KEY-----",
        "AIza" + "hunter22" * 4,
    ],
)
def test_code_that_is_sent_to_others_holds_no_secret(text: str) -> None:
    hidden = masked_code(text)
    assert MASK in hidden and "hunter22" not in hidden and "deadbeef" not in hidden


@pytest.mark.parametrize(
    "text",
    [
        'pad_token: str = "<pad>"',
        "def attend(\n    self,\n    token: torch.Tensor,\n    auth: bool = False,\n): ...",
        'tokenizer = AutoTokenizer.from_pretrained("gpt2")',
        'key = "weight"',
        "sig = inspect.signature(function)",
    ],
)
def test_code_without_secrets_stays(text: str) -> None:
    assert masked_code(text) == text


@pytest.mark.parametrize(
    "text", ["a=" * 5000, "token = " + " " * 50_000, '"a' * 20_000, "eyJ-" * 5000, "a:" * 20_000, "{a" + " " * 50_000]
)
def test_no_text_takes_long_or_breaks_the_mask(text: str) -> None:
    """Without limits in the patterns some of these take minutes."""
    assert masked(f"{text}token=hunter2") != "" and "hunter2" not in masked_code(f"{text} token=hunter2")
