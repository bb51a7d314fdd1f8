# SPDX-License-Identifier: Apache-2.0
"""Builds the native extension; all metadata lives in pyproject.toml."""

from setuptools import setup

setup()
