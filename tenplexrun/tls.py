"""TLS on the ports of ours that other nodes reach: mutual, with one authority for all nodes of a job."""

from __future__ import annotations

import ssl
from dataclasses import asdict, dataclass

from tenplexrun.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. `cert` (with `key`) must be valid for the address that others reach this node at, and for
    both ends of a connection; `ca` has signed the certificates of all nodes."""

    cert: str
    key: str
    ca: str

    def server(self) -> ssl.SSLContext:
        """Takes only peers with a certificate of the authority. Raises UsageError for files that cannot be used."""
        return self._context(ssl.Purpose.CLIENT_AUTH)

    def client(self) -> ssl.SSLContext:
        """Also checks that the certificate is for the address that was called. Raises UsageError."""
        return self._context(ssl.Purpose.SERVER_AUTH)

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(purpose, cafile=self.ca)
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--tls-cert {self.cert}, --tls-key {self.key}, --tls-ca {self.ca} cannot be used: {error}; "
                "give PEM files, and the key without a password"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context
