"""The routes of the OpenAI API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.field_table import Reading
from coppice_scheduler.edge.http.generation import Generation
from coppice_scheduler.edge.http.requests import READ, caller_of
from coppice_scheduler.edge.openai.bodies import model_body
from coppice_scheduler.edge.openai.generate import GenerateApi
from coppice_scheduler.edge.openai.tokens import TokensApi


def add_openai(
    app: FastAPI, frontdoor: FrontDoor, generation: Generation, reading: Reading, body_timeout_s: float
) -> None:
    _add_models(app, frontdoor)
    generate = GenerateApi(frontdoor, generation)
    tokens = TokensApi(frontdoor, body_timeout_s, reading)
    app.post("/v1/completions")(generate.completions)
    app.post("/v1/chat/completions")(generate.chat_completions)
    app.post("/v1/responses")(generate.responses)
    for prefix in ("", "/v1"):
        app.post(f"{prefix}/tokenize")(tokens.tokenize)
        app.post(f"{prefix}/detokenize")(tokens.detokenize)


def _add_models(app: FastAPI, frontdoor: FrontDoor) -> None:
    async def list_models(request: Request) -> Response:
        models = frontdoor.models_of(caller_of(frontdoor, request))
        return JSONResponse({"object": "list", "data": [model_body(model) for model in models]})

    async def get_model(request: Request, model_id: str) -> Response:
        tenant = caller_of(frontdoor, request)
        return JSONResponse(model_body(frontdoor.check_model(tenant, model_id)))

    app.api_route("/v1/models", methods=READ)(list_models)
    app.api_route("/v1/models/{model_id:path}", methods=READ)(get_model)
