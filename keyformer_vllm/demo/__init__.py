# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a real model, a real article, with eviction on and off."""
