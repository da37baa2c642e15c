"""The OpenAI-compatible interface over a service: routes, limits, streaming, figures. Needs the `serve` extra."""

from workbench.serving.http.api import Api
from workbench.serving.http.errors import ApiError
from workbench.serving.http.quotas import Quota, read_quotas
from workbench.serving.http.server import HttpServer, bind_address, log_to_stderr
from workbench.serving.http.settings import ServerSettings, read_api_keys

__all__ = [
    "Api",
    "ApiError",
    "HttpServer",
    "Quota",
    "ServerSettings",
    "bind_address",
    "log_to_stderr",
    "read_api_keys",
    "read_quotas",
]
