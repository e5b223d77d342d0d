"""Recipes: settings of whole runs that ship with Surefoot, and how one is found by name."""

from __future__ import annotations

from surefoot.recipes.find import RecipeInfo, find_recipe, list_recipes

__all__ = ["RecipeInfo", "find_recipe", "list_recipes"]
