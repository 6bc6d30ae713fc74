"""The report: one HTML page about one run or several, made from their folders. Start with `page.py`."""

from jppo.plugins.report.page import report_line, write_report

__all__ = ["report_line", "write_report"]
