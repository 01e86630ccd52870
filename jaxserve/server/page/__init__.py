"""The page at `/`: a chat, and a view of the engine."""

from jaxserve.server.page.document import page_response, sign_in_response

__all__ = ["page_response", "sign_in_response"]
