"""Plans as messages and back, and nothing else."""

from __future__ import annotations

from cachelink_core.planner import Plan, Prediction
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2 as pb


def plan_to(value: Plan | None) -> pb.Plan | None:
    """To protobuf; nothing stays nothing."""
    if value is None:
        return None
    return pb.Plan(
        chosen=value.chosen,
        why=value.why,
        predicted_s=value.predicted_s,
        took_s=value.took_s,
        predictions=[_prediction_to(each) for each in value.predictions],
        assumed=value.assumed,
    )


def plan_from(message: pb.Plan) -> Plan:
    """From protobuf."""
    return Plan(
        chosen=message.chosen,
        why=message.why,
        predicted_s=message.predicted_s if message.HasField("predicted_s") else None,
        took_s=message.took_s if message.HasField("took_s") else None,
        predictions=tuple(_prediction_from(each) for each in message.predictions),
        assumed=tuple(message.assumed),
    )


def _prediction_to(value: Prediction) -> pb.Prediction:
    return pb.Prediction(
        way=value.way,
        ready_s=value.ready_s,
        first_token_s=value.first_token_s,
        total_s=value.total_s,
        wire_bytes=value.wire_bytes,
        parts=[pb.Phase(name=name, seconds=seconds) for name, seconds in value.parts.items()],
        excluded=value.excluded,
    )


def _prediction_from(message: pb.Prediction) -> Prediction:
    return Prediction(
        way=message.way,
        ready_s=message.ready_s if message.HasField("ready_s") else None,
        first_token_s=message.first_token_s if message.HasField("first_token_s") else None,
        total_s=message.total_s if message.HasField("total_s") else None,
        wire_bytes=message.wire_bytes,
        parts={part.name: part.seconds for part in message.parts},
        excluded=message.excluded,
    )
