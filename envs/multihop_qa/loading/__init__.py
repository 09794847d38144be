"""Questions out of files: `load_questions(path)`, and `parse_source` for FORMAT:PATH."""

from envs.multihop_qa.loading.questions import FORMATS, load_questions, parse_source

__all__ = ["FORMATS", "load_questions", "parse_source"]
