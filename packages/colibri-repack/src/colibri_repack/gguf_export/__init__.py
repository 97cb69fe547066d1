"""`.colibri` files written as GGUF again."""

from .export_plan import ExportPlan, plan_export
from .exporter import ExportReport, export

__all__ = ["ExportPlan", "ExportReport", "export", "plan_export"]
