"""Every route the gateway has: its path, its handler, whether it asks for a key or waits for a place."""

from pipeline.counting import TokenCounter
from pipeline.openapi import document_route
from pipeline.page import page_route
from pipeline.protocols import described
from pipeline.protocols.admin import AdminRoutes
from pipeline.protocols.chat_route import ChatApi
from pipeline.protocols.completions_route import CompletionsApi
from pipeline.protocols.conversations import ConversationRoutes
from pipeline.protocols.generate_route import GenerateApi
from pipeline.protocols.generation import GenerationRoute, Stations
from pipeline.protocols.messages_route import CountTokensRoute, MessagesApi
from pipeline.protocols.parse import ParseRoutes
from pipeline.protocols.refusals import anthropic_error
from pipeline.protocols.responses_background import RunningResponses
from pipeline.protocols.responses_route import KeptResponses, ResponsesApi
from pipeline.protocols.responses_store import ResponseStore
from pipeline.protocols.tokens import TokenRoutes
from pipeline.protocols.workers import WorkerRoutes
from pipeline.serve import Route


def all_routes(stations: Stations, admin: AdminRoutes, workers: WorkerRoutes, counter: TokenCounter) -> list[Route]:
    """A route's `about` is what `/openapi.json` says of it."""
    chat, about = GenerationRoute(stations, ChatApi()), described.chat.CHAT
    routes = [
        *_messages_routes(stations, counter),
        *_responses_routes(stations),
        *_text_routes(stations),
        Route("POST", "/v1/chat/completions", chat.handle, prefix="chatcmpl-", admitted=True, about=about),
        *_admin_routes(admin),
        *_worker_routes(workers),
    ]
    if stations.config.server.page:
        routes.append(page_route())
    return [*routes, document_route(routes, stations.config)]


def _messages_routes(stations: Stations, counter: TokenCounter) -> list[Route]:
    """Anthropic's SDKs send their key and read the request's id in headers of their own."""
    messages, count = GenerationRoute(stations, MessagesApi()), CountTokensRoute(stations, counter)
    return [
        Route(
            *("POST", path, handler),
            prefix="msg_",
            admitted=True,
            key_header="x-api-key",
            id_header="request-id",
            error_body=anthropic_error,
            about=about,
        )
        for path, handler, about in (
            ("/v1/messages", messages.handle, described.messages.MESSAGES),
            ("/v1/messages/count_tokens", count.handle, described.messages.COUNT_TOKENS),
        )
    ]


def _responses_routes(stations: Stations) -> list[Route]:
    keeping = stations.config.responses
    most = keeping.most if keeping.backend == "memory" else 0
    store = ResponseStore(
        most=most, most_bytes=keeping.most_bytes, most_items=keeping.most_items, retention_s=keeping.retention_s
    )
    running, about = RunningResponses(keeping.most_background), described.responses
    api, kept = GenerationRoute(stations, ResponsesApi(store, running)), KeptResponses(store, running)
    return [
        Route("POST", "/v1/responses", api.handle, prefix="resp-", admitted=True, about=about.RESPONSES),
        Route("GET", "/v1/responses/{id}", kept.get, about=about.GET_RESPONSE),
        Route("DELETE", "/v1/responses/{id}", kept.delete, about=about.DELETE_RESPONSE),
        Route("GET", "/v1/responses/{id}/input_items", kept.input_items, about=about.INPUT_ITEMS),
        Route("POST", "/v1/responses/{id}/cancel", kept.cancel, about=about.CANCEL_RESPONSE),
        *_conversation_routes(ConversationRoutes(stations, store)),
    ]


def _conversation_routes(conversations: ConversationRoutes) -> list[Route]:
    about, one = described.conversations, "/v1/conversations/{id}"
    return [
        Route("POST", "/v1/conversations", conversations.create, about=about.CREATE),
        Route("GET", one, conversations.get, about=about.GET),
        Route("POST", one, conversations.update, about=about.UPDATE),
        Route("DELETE", one, conversations.delete, about=about.DELETE),
        Route("GET", f"{one}/items", conversations.items, about=about.ITEMS),
        Route("POST", f"{one}/items", conversations.add_items, about=about.ADD_ITEMS),
        Route("GET", f"{one}/items/{{item_id}}", conversations.item, about=about.ITEM),
        Route("DELETE", f"{one}/items/{{item_id}}", conversations.delete_item, about=about.DELETE_ITEM),
    ]


def _text_routes(stations: Stations) -> list[Route]:
    completions, tokens = GenerationRoute(stations, CompletionsApi()), TokenRoutes(stations)
    generate, parse = GenerationRoute(stations, GenerateApi()), ParseRoutes(stations)
    about = described.completions.COMPLETIONS
    return [
        Route("POST", "/v1/completions", completions.handle, prefix="cmpl-", admitted=True, about=about),
        Route("POST", "/generate", generate.handle, prefix="gnt-", admitted=True, about=described.generate.GENERATE),
        Route("POST", "/parse/function_call", parse.function_call, admitted=True, about=described.parse.FUNCTION_CALL),
        Route("POST", "/parse/reasoning", parse.reasoning, admitted=True, about=described.parse.REASONING),
        Route("POST", "/v1/tokenize", tokens.tokenize, admitted=True, about=described.tokens.TOKENIZE),
        Route("POST", "/v1/detokenize", tokens.detokenize, admitted=True, about=described.tokens.DETOKENIZE),
    ]


def _admin_routes(admin: AdminRoutes) -> list[Route]:
    models, any_id = described.models, "/v1/models/{id:.+}"
    return [
        Route("GET", "/v1/models", admin.models, guarded=False, about=models.MODELS),
        Route("GET", "/v1/models/{id}", admin.model, guarded=False, pattern=any_id, about=models.MODEL),
        Route("GET", "/get_model_info", admin.model_info, about=models.MODEL_INFO),
        Route("GET", "/get_server_info", admin.server_info, about=models.SERVER_INFO),
        Route("GET", "/health", admin.health, guarded=False, about=models.HEALTH),
        Route("GET", "/liveness", admin.liveness, guarded=False, about=models.LIVENESS),
        Route("GET", "/readiness", admin.readiness, guarded=False, about=models.READINESS),
    ]


def _worker_routes(workers: WorkerRoutes) -> list[Route]:
    about = described.workers
    return [
        Route("GET", "/workers", workers.all, about=about.LIST_WORKERS),
        Route("POST", "/workers", workers.add, about=about.ADD_WORKER),
        Route("GET", "/workers/{id}", workers.get, about=about.GET_WORKER),
        Route("PATCH", "/workers/{id}", workers.change, about=about.CHANGE_WORKER),
        Route("PUT", "/workers/{id}", workers.replace, about=about.REPLACE_WORKER),
        Route("DELETE", "/workers/{id}", workers.remove, about=about.REMOVE_WORKER),
        Route("GET", "/loads", workers.loads, guarded=False, about=about.LOADS),
        Route("GET", "/get_loads", workers.loads, about=about.LOADS),
        Route("GET", "/health_generate", workers.health_generate, about=about.HEALTH_GENERATE),
        Route("POST", "/flush_cache", workers.flush_cache, about=about.FLUSH_CACHE),
    ]
