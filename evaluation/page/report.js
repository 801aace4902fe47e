(function () {
  "use strict";
  var form = document.getElementById("filter");
  if (!form) return;
  var find = document.getElementById("find");
  var kind = document.getElementById("kind");
  var count = document.getElementById("count");
  var entries = Array.prototype.slice.call(document.querySelectorAll("#problems > details"));
  function show() {
    var wanted = find.value.trim().toLowerCase();
    var shown = 0;
    entries.forEach(function (entry) {
      var kinds = entry.dataset.kinds.split("|");
      var fits = kind.value === "all" || kinds.indexOf(kind.value) >= 0;
      entry.hidden = !(fits && entry.dataset.id.toLowerCase().indexOf(wanted) >= 0);
      shown += entry.hidden ? 0 : 1;
    });
    count.textContent = shown + " of " + entries.length + " problems";
  }
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  find.addEventListener("input", show);
  kind.addEventListener("change", show);
  form.hidden = false;
  show();
})();
