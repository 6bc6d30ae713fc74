"""The report of one run or several: a page of its own, made from the runs' folders, for any browser."""

from jppo.report.page import report_line, write_report

__all__ = ["report_line", "write_report"]
