// Lint rules for the page code: the dev UI, the scripts in the sample's pages, and their tests.

import js from "@eslint/js";
import html from "eslint-plugin-html";
import globals from "globals";

export default [
  {ignores: [".venv*/", ".cache/", "build/", "site/", "docs/"]},
  js.configs.recommended,
  {
    files: ["toolbox_fastapi/dev_ui/page/*.js", "sample_app/static/*.js"],
    languageOptions: {globals: globals.browser, sourceType: "module"},
  },
  {
    files: ["sample_app/*.html"],
    plugins: {html},
    languageOptions: {globals: globals.browser, sourceType: "module"},
  },
  {
    files: ["tests/page/*.js", "tests/compat/*.js", "*.mjs"],
    languageOptions: {globals: globals.nodeBuiltin, sourceType: "module"},
  },
  {
    rules: {
      eqeqeq: "error",
      "no-implicit-globals": "off",
      "no-var": "error",
      "prefer-const": "error",
    },
  },
];
