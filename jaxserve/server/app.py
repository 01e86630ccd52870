"""The HTTP routes."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from jaxserve.server.body import BoundedRequest
from jaxserve.server.config import ServerConfig
from jaxserve.server.gate import Gate, error_response
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.openapi import with_limits
from jaxserve.server.page import page_response
from jaxserve.server.protocol import responses
from jaxserve.server.protocol.errors import (
    ApiError,
    ErrorResponse,
    from_engine,
    from_validation,
    unavailable,
)
from jaxserve.server.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from jaxserve.server.service import Service
from jaxserve.version import __version__

STARTING_RETRY_AFTER_S = 5


class Status:
    """What the routes have to serve: nothing until the engine is ready, and nothing new once the
    server is shutting down."""

    service: Service | None = None
    is_draining = False

    def ready_service(self) -> Service:
        """ApiError 503 unless requests can be served."""
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if self.service is None:
            raise unavailable("the model is being loaded", STARTING_RETRY_AFTER_S)
        if self.service.engine.error is not None:
            raise from_engine(self.service.engine.error)
        return self.service

    def check_whole(self) -> None:
        """ApiError 503 unless all engines serve."""
        failure = self.ready_service().engine.failure
        if failure is not None:
            raise from_engine(failure)


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The document at /openapi.json."""
        document = super().openapi()
        service = self.state.status.service
        return document if service is None else with_limits(document, service.info)


def make_app(config: ServerConfig, api_keys: list[str], status: Status) -> FastAPI:
    """`status` belongs to the caller, who changes it as the server's life goes on."""
    app = _App(
        title="jaxserve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.status = status
    app.state.max_request_bytes = config.max_request_bytes
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _internal_error)
    app.include_router(_router)
    app.add_middleware(Gate, api_keys=api_keys, logs_requests=not config.disable_log_requests)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            return await handle(BoundedRequest(request.scope, request.receive))

        return handle_bounded


def _service(request: Request) -> Service:
    return request.app.state.status.ready_service()


def _check_whole(request: Request) -> None:
    request.app.state.status.check_whole()


Ready = Annotated[Service, Depends(_service)]
_router = APIRouter(
    route_class=_Route, responses={"4XX": {"model": ErrorResponse}, 503: {"model": ErrorResponse}}
)


def _streamed(model: type) -> dict[int | str, dict[str, Any]]:
    """A JSON answer or, with stream=true, events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {200: {"model": model, "content": {"text/event-stream": {"schema": event}}}}


@_router.get("/", include_in_schema=False)
async def show_page() -> Response:
    """A chat and a view of the engine, for people: while the model is being loaded, too."""
    return page_response()


@_router.post("/v1/completions", response_class=Response, responses=_streamed(responses.Completion))
async def create_completion(body: CompletionRequest, request: Request, service: Ready) -> Response:
    return await service.complete(body, request, f"cmpl-{request.state.id}")


@_router.post(
    "/v1/chat/completions", response_class=Response, responses=_streamed(responses.ChatCompletion)
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, service: Ready
) -> Response:
    return await service.chat(body, request, f"chatcmpl-{request.state.id}")


@_router.get("/v1/models")
async def list_models(service: Ready) -> responses.ModelList:
    return service.models()


@_router.post("/tokenize")
async def tokenize(
    body: TokenizeTextRequest | TokenizeChatRequest, service: Ready
) -> responses.Tokenized:
    return await service.tokenize(body)


@_router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: Ready) -> responses.Detokenized:
    return await service.detokenize(body)


@_router.get("/health", response_class=Response, dependencies=[Depends(_check_whole)])
async def health() -> Response:
    """200 while every engine makes progress or is idle."""
    return Response()


@_router.get("/ping", response_class=Response, dependencies=[Depends(_check_whole)])
async def ping() -> Response:
    return Response()


@_router.get("/version")
async def show_version() -> responses.Version:
    return {"version": __version__}


@_router.get("/load")
async def show_load(service: Ready) -> responses.Load:
    return {"server_load": service.engine.num_open}


@_router.get("/metrics", response_class=Response)
async def show_metrics(service: Ready) -> Response:
    return Response(service.metrics.page(), media_type=CONTENT_TYPE)


@_router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: Ready) -> responses.PrefixCacheResetDone:
    """Forget cached prefixes; false while requests hold blocks."""
    try:
        return {"success": await service.engine.reset_prefix_cache()}
    except RuntimeError as error:
        raise from_engine(error) from error


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    return error_response(error)


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    if isinstance(error.body, bytes):  # never parsed
        return error_response(ApiError(415, "the Content-Type must be application/json"))
    return error_response(from_validation(error.errors(), error.body))


async def _internal_error(request: Request, error: Exception) -> Response:
    """uvicorn logs the traceback."""
    return error_response(ApiError(500, "internal error"))
