"""Which axes this version has strategies for: the others are refused, never ignored."""

from __future__ import annotations

from reparto.config.plan import Plan
from reparto.errors import UserError

#: fields of a plan whose strategy does not exist yet
UNBUILT_AXES = ("context",)


def refuse_unbuilt(plan: Plan) -> None:
    """Raise `UserError` for a plan that needs a strategy this version does not have."""
    for field in UNBUILT_AXES:
        if getattr(plan, field) > 1:
            raise UserError(
                f"{field} parallelism is not built yet",
                where=f"partition.{field}",
                legal="1",
                nearest=plan.model_copy(update={field: 1}).text,
            )
