"""What `conform` returns: one row for each case, as a table and as JUnit XML."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree


@dataclass(frozen=True)
class CaseRow:
    """A case. values: how many were compared; differing: how many are wrong, None if they cannot be counted;
    detail: the first difference, or what was measured."""

    name: str
    passed: bool
    values: int
    differing: int | None = 0
    detail: str = ""


@dataclass(frozen=True)
class Conformance:
    """The rows of all cases of a quantizer, and the spec as text. note: what the statistical tests can see."""

    kernel: str
    spec: str
    rows: tuple[CaseRow, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def failed(self) -> list[str]:
        """The names of the cases that failed."""
        return [row.name for row in self.rows if not row.passed]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{self.kernel} against {self.spec}",
            f"{'case':{width}}  result     values  differing  first difference",
        ]
        for row in self.rows:
            differing = "–" if row.differing is None else f"{row.differing:,}"
            result = "passed" if row.passed else "FAILED"
            lines.append(f"{row.name:{width}}  {result}  {row.values:>9,}  {differing:>9}  {row.detail}".rstrip())
        wrong = len(self.failed)
        lines.append(
            f"{len(self.rows) - wrong} of {len(self.rows)} cases passed" + (f"; failed: {wrong}" if wrong else "")
        )
        return "\n".join([*lines, self.note] if self.note else lines)

    def to_junit(self) -> str:
        """The rows as JUnit XML: one test case for each."""
        suite = ElementTree.Element(
            "testsuite", name=f"binade conform {self.spec}", tests=str(len(self.rows)), failures=str(len(self.failed))
        )
        for row in self.rows:
            case = ElementTree.SubElement(suite, "testcase", classname=self.kernel, name=row.name)
            if not row.passed:
                message = row.detail or f"{row.differing} values differ"
                printable = "".join(letter if letter.isprintable() else " " for letter in message)  # XML has no others
                ElementTree.SubElement(case, "failure", message=printable)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
