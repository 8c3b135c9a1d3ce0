"""What a run did, to look at: one HTML page, the same page served while the run goes on, and a trace.

    data = RunReader(folder).read()             # rows of metrics.jsonl, as they are, and the processes' times
    Path("report.html").write_text(page(document(data, read_groups(journal))))
    write_trace(data, Path("trace.json"))

All numbers come from the run folder; the page draws them and computes none of its own but shares and sums.
"""

from headway.report.document import document
from headway.report.groups import read_groups
from headway.report.page import page
from headway.report.rows import RunData, RunReader
from headway.report.serve import Watch
from headway.report.trace import write_trace

__all__ = ["RunData", "RunReader", "Watch", "document", "page", "read_groups", "write_trace"]
