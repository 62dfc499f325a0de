"""An Engine with its predictor: verified before anything heavy is loaded, joined to the checkpoint's routers after."""

from __future__ import annotations

from vismmoe.config import EngineConfig, InferConfig, resolve_model
from vismmoe.engine import Engine, PredictorOrigin, Request
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.predictors import NextGate, build_predictor
from vismmoe_deploy.resolve import resolve


def load_engine(
    config: EngineConfig,
    predictor: str | None = None,
    tracking_uri: str | None = None,
    request: Request | None = None,
) -> Engine:
    """Load the model of `config`, guided by the predictor that `predictor` names (None: nothing is prefetched).

    request: the one that will be asked, which memory is then planned for.

    Raises ArtifactError when the predictor was made for another model, and all that resolve() and Engine.load() raise.
    """
    if predictor is None:
        return Engine.load(config, request=request)
    spec = open_checkpoint(resolve_model(config.model)).spec
    registry = tracking_uri or (config.tracking_uri if isinstance(config, InferConfig) else None)
    found = resolve(predictor, registry, spec)
    guide = build_predictor(found.artifact)
    engine = Engine.load(config, guide, origin=PredictorOrigin(found.source, found.version), request=request)
    try:
        guide.bind(NextGate(engine.spec, engine.routers, engine.router_norms, guide.window))
    except BaseException:
        engine.close()
        raise
    return engine
