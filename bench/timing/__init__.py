"""Measuring one case: values first, then candidates in turns."""
