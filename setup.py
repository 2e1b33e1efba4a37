"""The links on the package's page, from one variable: "owner/name", which GitHub sets where a release is built."""

import os

import setuptools

REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # without it there are no links
OWNER, _, NAME = (REPOSITORY or "").partition("/")
URLS = {
    "Documentation": f"https://{OWNER.lower()}.github.io/{NAME}/",
    "Repository": f"https://github.com/{REPOSITORY}",
    "Changelog": f"https://github.com/{REPOSITORY}/blob/main/CHANGELOG.md",
    "Issues": f"https://github.com/{REPOSITORY}/issues",
}
setuptools.setup(project_urls=URLS if REPOSITORY else {})
