"""Bearer tokens: who calls, and which tenant that is.

The operator's configuration maps tokens to tenants. A tenant is never taken from a message: it
follows from the token, or is ``default`` where the daemon has no tokens at all. Health and
reflection need none, so that probes work.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc

from cachelink_core import limits
from cachelink_core.errors import CacheLinkError, ConfigError, Denied, Unauthenticated
from cachelink_core.names import DEFAULT_TENANT
from cachelink_core.rpc.status import abort

_HEADER: Final = "authorization"
_SCHEME: Final = "Bearer "
_EXEMPT: Final = ("/grpc.health.v1.", "/grpc.reflection.")
_MIN_TOKEN_CHARS: Final = 16

Metadata = tuple[tuple[str, str | bytes], ...]


def bearer(token: str | None) -> Metadata:
    """Metadata of a client's calls."""
    return () if token is None else ((_HEADER, _SCHEME + token),)


class Tokens:
    """The operator's tokens; without any, every caller is the default tenant."""

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        """Checks and keeps the tokens.

        Args:
            tenants: token to tenant. Several tokens may belong to one tenant.

        Raises:
            ConfigError: a token or tenant that cannot be meant.
        """
        for token, tenant in (tenants or {}).items():
            if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
                raise ConfigError(
                    f"tokens: the one of tenant {tenant!r} must have at least {_MIN_TOKEN_CHARS} "
                    "printable ASCII characters"
                )
            if not 0 < len(tenant) <= limits.MAX_ID_CHARS:
                raise ConfigError(
                    f"tokens: tenant {tenant[:40]!r} must have 1 to {limits.MAX_ID_CHARS} characters"
                )
        self._tenants = [(token.encode(), tenant) for token, tenant in (tenants or {}).items()]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, metadata: Any) -> str:
        """The tenant of a call, from its metadata.

        Raises:
            Unauthenticated: no token, and this daemon asks for one.
            Denied: a token that the operator did not give out.
        """
        if not self._tenants:
            return DEFAULT_TENANT
        sent = next((value for key, value in metadata or () if key == _HEADER), "")
        text = sent.decode("utf-8", "replace") if isinstance(sent, bytes) else sent
        if not text.startswith(_SCHEME):
            raise Unauthenticated("no bearer token in the metadata; this daemon asks for one")
        token, found = text.removeprefix(_SCHEME).encode(), None
        # Every token is compared, in constant time: a caller learns nothing from the time it takes.
        for known, tenant in self._tenants:
            if hmac.compare_digest(token, known):
                found = tenant
        if found is None:
            raise Denied("the bearer token is unknown to this daemon")
        return found

    def tenant_of(self, context: grpc.ServicerContext) -> str:
        """The tenant of a running call that the interceptor let through."""
        return self.tenant(context.invocation_metadata())


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without a valid token before their handler is found."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        """Lets a call through, or answers it with the refusal."""
        if not handler_call_details.method.startswith(_EXEMPT):
            try:
                self._tokens.tenant(handler_call_details.invocation_metadata)
            except CacheLinkError as error:
                return _refusal(error)
        return continuation(handler_call_details)


def _refusal(error: CacheLinkError) -> Any:
    """A handler that refuses at once: of the kind that does not wait for a request."""

    def refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
