"""The server as an application of Ray Serve: Ray starts the replicas and its proxy spreads the requests over them.

In an environment with `ray[serve]` and this package's extra `serve`, at the root of the checkout:

    serve run examples.ray_serve:app target=smollm2-135m-instruct serve.max-length=1024

Arguments are flags of `python -m eagle3_jax.serve`. A replica is one process with the devices that Ray leaves it. On
TPU VMs give it the chips of its host, and as many replicas as there are hosts, in Ray Serve's config file:

    deployments: [{name: eagle3_jax, num_replicas: 2, ray_actor_options: {resources: {TPU: 8}}}]
"""

from __future__ import annotations

from ray import serve
from starlette.applications import Starlette

from eagle3_jax.decoding.defaults import sampling_defaults
from eagle3_jax.serve.__main__ import configure, load
from eagle3_jax.serve.app import make_app


def app(arguments: dict[str, str]) -> serve.Application:
    """Makes the application; `serve run` and a config file of Ray Serve call it with their arguments."""
    config = configure([word for name, value in arguments.items() for word in (f"--{name}", value)])
    settings = config.serve

    def build() -> Starlette:  # on the replica, which answers when this returns
        defaults = sampling_defaults(settings.generation_config, config.target.name)
        return make_app(load(config, print), settings.model_name or config.target.name, settings, (), defaults)

    class Server:
        """The replica; its routes are the application's."""

    at_once = settings.batch_size + settings.queue_limit
    deployment = serve.deployment(serve.ingress(build)(Server), name="eagle3_jax", max_ongoing_requests=at_once)
    return deployment.bind()
