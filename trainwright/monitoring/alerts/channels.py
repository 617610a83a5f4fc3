"""Channels of alerts: a webhook, apprise, a command, the desktop. Errors of a channel never contain a secret."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.error import HTTPError, URLError

from trainwright.errors import TrainwrightError, UsageError, import_optional
from trainwright.monitoring.alerts.rules import Alert

TIMEOUT_S = 10.0


class NotDeliveredError(TrainwrightError):
    """A channel did not accept an alert. The message contains no address and no header."""


class Channel(Protocol):
    """Delivers an alert of the run called ``run``. Raises NotDeliveredError."""

    @property
    def name(self) -> str: ...

    def send(self, run: str, alert: Alert) -> None: ...


@dataclass(frozen=True, repr=False)
class Webhook:
    """POSTs ``{"text": ...}``, the format of Slack and Mattermost, to the address in an environment variable."""

    url: str
    name: str = "webhook"

    @classmethod
    def of_variable(cls, variable: str, environ: Mapping[str, str]) -> Webhook:
        """Return the webhook of an environment variable. Raises UsageError, without its value, if it has no address."""
        url = environ.get(variable, "").strip()
        if not url:
            raise UsageError(
                f"alerts.webhook: the environment variable {variable} is not set",
                remedy=f"export {variable}=https://..., or leave alerts out: --set alerts=null",
            )
        if not url.startswith(("https://", "http://")):
            raise UsageError(
                f"alerts.webhook: {variable} is not an address", remedy="it must begin with https:// or http://"
            )
        return cls(url)

    def send(self, run: str, alert: Alert) -> None:
        text = (
            f"{run}: {alert.text}".replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        )  # required by Slack
        body = json.dumps({"text": text}).encode()
        try:
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"}, method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read(1024)
        except HTTPError as error:
            error.close()
            raise NotDeliveredError(f"the server answered {error.code}") from None
        except URLError as error:
            reason = error.reason
            why = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
            raise NotDeliveredError(f"cannot be reached: {why}") from None
        except Exception as error:  # http.client and ssl raise many kinds, some with the address in their text
            raise NotDeliveredError(f"failed: {type(error).__name__}") from None


class Apprise:
    """Sends through the package apprise to the addresses in an environment variable: Telegram, e-mail and others."""

    name = "apprise"

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises MissingExtra, or UsageError, without the address, if apprise does not support one."""
        apprise = import_optional("apprise", needed_for="alerts.apprise")
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its messages contain addresses
        self._sender = apprise.Apprise()
        for number, each in enumerate(addresses, 1):
            if not self._sender.add(each):
                raise UsageError(
                    f"alerts.apprise: address {number} of {len(addresses)} is not one that apprise supports",
                    remedy="see the table of services in the documentation of apprise",
                )

    @classmethod
    def of_variable(cls, variable: str, environ: Mapping[str, str]) -> Apprise:
        """Return the channel of an environment variable. Raises UsageError, without its value, if it is empty."""
        addresses = environ.get(variable, "").split()
        if not addresses:
            raise UsageError(
                f"alerts.apprise: the environment variable {variable} is not set",
                remedy=f"export {variable}='tgram://TOKEN/CHAT', or leave alerts out: --set alerts=null",
            )
        return cls(addresses)

    def send(self, run: str, alert: Alert) -> None:
        try:
            is_sent = self._sender.notify(title=f"{run}: {alert.kind}", body=alert.text)
        except Exception as error:  # services raise many kinds, some with the address in their text
            raise NotDeliveredError(f"failed: {type(error).__name__}") from None
        if not is_sent:
            raise NotDeliveredError(f"at least one of {len(self._sender)} addresses did not accept it")


@dataclass(frozen=True)
class Command:
    """Runs a program without a shell, with ``{"run", "kind", "step", "text"}`` on its standard input."""

    argv: tuple[str, ...]
    name: str = "command"

    @classmethod
    def of(cls, argv: Sequence[str]) -> Command:
        """Return the command. Raises UsageError if there is no such program."""
        if shutil.which(argv[0]) is None:
            raise UsageError(
                f"alerts.command: there is no program {argv[0]}",
                remedy="give its path, and make it executable: chmod +x",
            )
        return cls(tuple(argv))

    def send(self, run: str, alert: Alert) -> None:
        _run(self.argv, json.dumps({"run": run, **alert._asdict()}))


def desktop(platform: str = sys.platform) -> Channel:
    """Return the channel for desktop notifications of this machine. Raises UsageError if it has no program for them."""
    program = "osascript" if platform == "darwin" else "notify-send"
    found = shutil.which(program)
    if found is None:
        raise UsageError(
            f"alerts.desktop: there is no program {program} on this machine",
            remedy="install libnotify-bin, or use a webhook or a command instead",
        )
    if platform == "darwin":  # the texts are passed as arguments, so they are not executed as a script
        script = "on run argv\ndisplay notification (item 2 of argv) with title (item 1 of argv)\nend run"
        return _Desktop((found, "-e", script))
    return _Desktop((found, "--app-name=Trainwright", "--"))


@dataclass(frozen=True)
class _Desktop:
    """Runs a program with the title and the text of a notification as its last two arguments."""

    argv: tuple[str, ...]
    name: str = "desktop"

    def send(self, run: str, alert: Alert) -> None:
        _run([*self.argv, f"{run}: {alert.kind}", alert.text])


def _run(argv: Sequence[str], message: str = "") -> None:
    """Run a program with ``message`` on its standard input. Raises NotDeliveredError if it fails."""
    output = subprocess.DEVNULL
    try:
        done = subprocess.run(
            argv, input=message.encode(), stdout=output, stderr=output, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotDeliveredError(f"it ran for more than {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise NotDeliveredError(f"it could not be run: {error.strerror}") from None
    if done.returncode:
        raise NotDeliveredError(f"it ended with {done.returncode}")
