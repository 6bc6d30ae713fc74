// The settings: what differs from jppo's defaults, or between the runs; all of them when asked for.

function drawSettings(runs, rows) {
  const into = byId("setting-list");
  if (!rows.length) {
    into.append(element("p", { class: "soft" }, "There are no settings: no config.json could be read."));
    return;
  }
  const different = rows.filter((row) => row.differs);
  const what = runs.length > 1 ? "differ between the runs" : "differ from jppo's defaults";
  into.append(element("p", { class: "soft" }, `${different.length} of ${rows.length} settings ${what}.`));
  if (different.length) into.append(settingTable(runs, different));
  const filter = element("input", { type: "search", placeholder: "name of a setting" });
  const all = element("div");
  const fill = () => all.replaceChildren(settingTable(runs, rows.filter((row) => row.name.includes(filter.value.trim().toLowerCase()))));
  filter.addEventListener("input", fill);
  const fold = element("details", { ontoggle: () => { if (fold.open && !all.hasChildNodes()) fill(); } },
    element("summary", {}, "All settings"), element("div", { class: "controls" }, element("label", { class: "grow" }, "Filter ", filter)), all);
  into.append(fold);
}

function settingTable(runs, rows) {
  const head = [element("th", { scope: "col" }, "setting"),
    ...runs.map((run, i) => element("th", { scope: "col" }, runs.length > 1 ? [dot(runColour(i)), run.name] : "this run")),
    element("th", { scope: "col" }, "default")];
  const body = rows.map((row) => element("tr", { class: row.differs ? null : "same" }, element("td", {}, row.name),
    row.values.map((value) => element("td", {}, value ?? "–")), element("td", { class: "soft" }, row.default ?? "no such setting")));
  return element("div", { class: "scroll" }, element("table", { class: "setting" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}
